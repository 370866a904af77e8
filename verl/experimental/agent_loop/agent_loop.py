"""Import path of the parts of agent loops in the established verl interface."""

from verl.experimental.agent_loop.base import AgentLoopBase as AgentLoopBase
from verl.experimental.agent_loop.base import AgentLoopMetrics as AgentLoopMetrics
from verl.experimental.agent_loop.base import AgentLoopOutput as AgentLoopOutput
from verl.experimental.agent_loop.manager import AgentLoopManager as AgentLoopManager
from verl.experimental.agent_loop.registry import register as register
from verl.experimental.agent_loop.servers import AsyncLLMServerManager as AsyncLLMServerManager
from verl.experimental.agent_loop.worker import AgentLoopWorker as AgentLoopWorker
from verl.experimental.agent_loop.worker import AgentLoopWorkerBase as AgentLoopWorkerBase
from verl.utils.import_utils import lazy_exports

__getattr__ = lazy_exports(__name__, {"get_trajectory_info": "verl.compat.agent_loops"})
