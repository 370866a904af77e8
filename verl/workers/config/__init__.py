"""One dataclass per worker node of the configuration, with its checks."""

from verl.workers.config.actor_critic import ActorConfig as ActorConfig
from verl.workers.config.actor_critic import CheckpointConfig as CheckpointConfig
from verl.workers.config.actor_critic import CriticConfig as CriticConfig
from verl.workers.config.actor_critic import FSDPActorConfig as FSDPActorConfig
from verl.workers.config.actor_critic import FSDPCriticConfig as FSDPCriticConfig
from verl.workers.config.actor_critic import FSDPCriticModelCfg as FSDPCriticModelCfg
from verl.workers.config.actor_critic import McoreActorConfig as McoreActorConfig
from verl.workers.config.actor_critic import McoreCriticConfig as McoreCriticConfig
from verl.workers.config.actor_critic import McoreCriticModelConfig as McoreCriticModelConfig
from verl.workers.config.actor_critic import PolicyLossConfig as PolicyLossConfig
from verl.workers.config.actor_rollout_ref import ActorRolloutRefConfig as ActorRolloutRefConfig
from verl.workers.config.actor_rollout_ref import FSDPRefConfig as FSDPRefConfig
from verl.workers.config.actor_rollout_ref import RefConfig as RefConfig
from verl.workers.config.engine import FSDPEngineConfig as FSDPEngineConfig
from verl.workers.config.engine import McoreEngineConfig as McoreEngineConfig
from verl.workers.config.model import BaseModelConfig as BaseModelConfig
from verl.workers.config.model import HFModelConfig as HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig as FSDPOptimizerConfig
from verl.workers.config.optimizer import McoreOptimizerConfig as McoreOptimizerConfig
from verl.workers.config.optimizer import OptimizerConfig as OptimizerConfig
from verl.workers.config.reward_model import CustomRewardFunctionConfig as CustomRewardFunctionConfig
from verl.workers.config.reward_model import OverlongBufferConfig as OverlongBufferConfig
from verl.workers.config.reward_model import RewardModelConfig as RewardModelConfig
from verl.workers.config.reward_model import RewardModelDataProcessorConfig as RewardModelDataProcessorConfig
from verl.workers.config.reward_model import RewardModelModelConfig as RewardModelModelConfig
from verl.workers.config.rollout import AgentLoopConfig as AgentLoopConfig
from verl.workers.config.rollout import CustomAsyncServerConfig as CustomAsyncServerConfig
from verl.workers.config.rollout import MultiTurnConfig as MultiTurnConfig
from verl.workers.config.rollout import RolloutConfig as RolloutConfig
from verl.workers.config.rollout import SamplingConfig as SamplingConfig
from verl.workers.config.rollout import ServerConfig as ServerConfig
from verl.workers.config.rollout import TraceConfig as TraceConfig

MegatronEngineConfig = McoreEngineConfig
"""The name that configuration files for verl give as ``_target_`` of reference and reward model."""
