"""Agent loops: programs that produce a trajectory by asking rollout servers, one per sample."""

from verl.utils.import_utils import lazy_exports

_HERE = "verl.experimental.agent_loop"
_EXPORTS = {
    "AgentLoopBase": f"{_HERE}.base",
    "AgentLoopManager": f"{_HERE}.manager",
    "AgentLoopMetrics": f"{_HERE}.base",
    "AgentLoopOutput": f"{_HERE}.base",
    "AgentLoopWorker": f"{_HERE}.worker",
    "AgentLoopWorkerBase": f"{_HERE}.worker",
    "AsyncLLMServerManager": f"{_HERE}.servers",
    "SingleTurnAgentLoop": f"{_HERE}.single_turn_agent_loop",
    "register": f"{_HERE}.registry",
}
__all__ = list(_EXPORTS)

__getattr__ = lazy_exports(__name__, _EXPORTS)  # the launching process reads the names of loops without torch
