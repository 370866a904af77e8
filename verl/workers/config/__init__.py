"""One dataclass per worker node of the configuration, with its checks."""

from verl.workers.config.actor import ActorConfig, FSDPActorConfig, PolicyLossConfig
from verl.workers.config.actor_rollout_ref import ActorRolloutRefConfig
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.critic import CriticConfig, FSDPCriticConfig, FSDPCriticModelCfg
from verl.workers.config.engine import FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.megatron import McoreActorConfig, McoreCriticConfig, McoreCriticModelConfig
from verl.workers.config.model import BaseModelConfig, HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig, McoreOptimizerConfig, OptimizerConfig
from verl.workers.config.ref import FSDPRefConfig, RefConfig
from verl.workers.config.reward import CustomRewardFunctionConfig, OverlongBufferConfig
from verl.workers.config.reward_model import RewardModelConfig, RewardModelModelConfig
from verl.workers.config.rollout import (
    AgentLoopConfig,
    CustomAsyncServerConfig,
    MultiTurnConfig,
    RolloutConfig,
    SamplingConfig,
    ServerConfig,
    TraceConfig,
)

__all__ = [
    "ActorConfig",
    "ActorRolloutRefConfig",
    "AgentLoopConfig",
    "BaseModelConfig",
    "CheckpointConfig",
    "CriticConfig",
    "CustomAsyncServerConfig",
    "CustomRewardFunctionConfig",
    "FSDPActorConfig",
    "FSDPCriticConfig",
    "FSDPCriticModelCfg",
    "FSDPEngineConfig",
    "FSDPOptimizerConfig",
    "FSDPRefConfig",
    "HFModelConfig",
    "McoreActorConfig",
    "McoreCriticConfig",
    "McoreCriticModelConfig",
    "McoreEngineConfig",
    "McoreOptimizerConfig",
    "MultiTurnConfig",
    "OptimizerConfig",
    "OverlongBufferConfig",
    "PolicyLossConfig",
    "RefConfig",
    "RewardModelConfig",
    "RewardModelModelConfig",
    "RolloutConfig",
    "SamplingConfig",
    "ServerConfig",
    "TraceConfig",
]
