"""Actor and critic on Megatron-Core."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import Violation
from verl.workers.config.actor import ActorConfig, merged_optimizer, positive_rules
from verl.workers.config.critic import CriticConfig
from verl.workers.config.engine import McoreEngineConfig
from verl.workers.config.model import BaseModelConfig, HFModelConfig
from verl.workers.config.optimizer import McoreOptimizerConfig


@dataclass
class McoreActorConfig(ActorConfig):
    """The policy under training, on Megatron-Core."""

    strategy: str = "megatron"
    optim: McoreOptimizerConfig = field(default_factory=lambda: McoreOptimizerConfig(lr=1e-6))
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    data_loader_seed: int | None = None
    load_weight: bool = True
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatron

    def rules(self) -> Iterator[Violation]:
        """Yield what ``ActorConfig`` does, other strategies."""
        yield from super().rules()
        yield from mcore_role_rules(self)

    def optimizer(self) -> McoreOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        merged: McoreOptimizerConfig = merged_optimizer(self.optim, 1.0)
        return merged


@dataclass
class McoreCriticModelConfig(BaseModelConfig):
    """The model of the value function, on Megatron-Core."""

    use_shm: bool = False
    enable_gradient_checkpointing: bool = True

    def as_model_config(self) -> HFModelConfig:
        """Return the node from which an engine builds the value model."""
        return HFModelConfig(**{name: value for name, value in self.items() if name != "_target_"})


@dataclass
class McoreCriticConfig(CriticConfig):
    """The value function under training, on Megatron-Core."""

    _mutable_fields = CriticConfig._mutable_fields | {"forward_micro_batch_size", "forward_micro_batch_size_per_gpu"}

    strategy: str = "megatron"
    optim: McoreOptimizerConfig = field(default_factory=lambda: McoreOptimizerConfig(lr=1e-5))
    model: McoreCriticModelConfig = field(default_factory=McoreCriticModelConfig)
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    forward_micro_batch_size: int | None = None
    forward_micro_batch_size_per_gpu: int | None = None
    data_loader_seed: int | None = None
    load_weight: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatron

    def rules(self) -> Iterator[Violation]:
        """Yield what ``CriticConfig`` does, other strategies."""
        yield from super().rules()
        yield from mcore_role_rules(self)
        yield from positive_rules(self, "forward_micro_batch_size", "forward_micro_batch_size_per_gpu")

    def optimizer(self) -> McoreOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        merged: McoreOptimizerConfig = merged_optimizer(self.optim, 1.0)
        return merged


def mcore_role_rules(config: Any) -> Iterator[Violation]:
    """Yield what is wrong with the keys that every role on Megatron-Core has."""
    if config.strategy != "megatron":
        expected = "must be megatron with these keys; the others are of ppo_trainer"
        yield Violation("strategy", config.strategy, expected)
