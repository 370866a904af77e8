"""Actor and critic on Megatron-Core."""

from dataclasses import dataclass, field

from verl.base_config import setting
from verl.workers.config.actor import ActorConfig
from verl.workers.config.critic import CriticConfig
from verl.workers.config.engine import McoreEngineConfig
from verl.workers.config.model import BaseModelConfig
from verl.workers.config.optimizer import McoreOptimizerConfig

OTHER_STRATEGIES = "the others are of ppo_trainer"


@dataclass
class McoreActorConfig(ActorConfig):
    """The policy under training, on Megatron-Core."""

    strategy: str = setting("megatron", "training engine", one_of=("megatron",), hint=OTHER_STRATEGIES)
    optim: McoreOptimizerConfig = field(default_factory=lambda: McoreOptimizerConfig(lr=1e-6))
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    data_loader_seed: int | None = None
    load_weight: bool = setting(True, "load the weights of model.path; false starts from random ones")
    use_rollout_log_probs: bool = setting(False, "use the old log-probs of the batch even where on-policy")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatron

    def optimizer(self) -> McoreOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        return self.optim.limited(1.0)


@dataclass
class McoreCriticModelConfig(BaseModelConfig):
    """The model of the value function, on Megatron-Core."""

    use_shm: bool = setting(False, "load from a copy in shared memory")
    enable_gradient_checkpointing: bool = setting(True, "compute activations again in the backward pass")


@dataclass
class McoreCriticConfig(CriticConfig):
    """The value function under training, on Megatron-Core."""

    strategy: str = setting("megatron", "training engine", one_of=("megatron",), hint=OTHER_STRATEGIES)
    optim: McoreOptimizerConfig = field(default_factory=lambda: McoreOptimizerConfig(lr=1e-5))
    model: McoreCriticModelConfig = field(default_factory=McoreCriticModelConfig)
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    data_loader_seed: int | None = None
    load_weight: bool = setting(True, "load the weights of model.path; false starts from random ones")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatron

    def optimizer(self) -> McoreOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        return self.optim.limited(1.0)
