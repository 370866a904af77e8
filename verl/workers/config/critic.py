"""The critic: batches, loss, optimizer, model and engine of the value function."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.algos.names import LOSS_AGG_MODES
from verl.base_config import BaseConfig, ConfigError, Violation
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.actor import (
    fsdp_role_rules,
    merged_optimizer,
    micro_batch_rules,
    mini_batch_rules,
    positive_rules,
)
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.engine import NCCL_TIMEOUT_S, STRATEGIES, FSDPEngineConfig
from verl.workers.config.model import BaseModelConfig, HFModelConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig, OptimizerConfig


@dataclass
class CriticConfig(BaseConfig):
    """The value function under training, whatever its engine."""

    _mutable_fields = frozenset(
        {"ppo_micro_batch_size_per_gpu", "ppo_mini_batch_size", "ppo_micro_batch_size", "model_config", "engine"}
    )

    rollout_n: int = 1
    strategy: str = "???"
    enable: bool | None = None
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: BaseModelConfig = field(default_factory=BaseModelConfig)
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    ppo_infer_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 32768
    ppo_infer_max_token_len_per_gpu: int = 32768
    forward_max_token_len_per_gpu: int = 32768
    ppo_epochs: int = 1
    shuffle: bool = False
    data_loader_seed: int | None = 1
    cliprange_value: float = 0.5
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig | None = field(default_factory=ProfilerConfig)
    engine: BaseConfig = field(default_factory=BaseConfig)
    model_config: Any = None
    nccl_timeout: int = NCCL_TIMEOUT_S

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_config is None:
            self.model_config = self.model

    def rules(self) -> Iterator[Violation]:
        """Yield unknown names, batch sizes that exclude each other, and values outside their range."""
        if self.strategy == "???":
            yield Violation("strategy", self.strategy, f"is missing: write one of {', '.join(STRATEGIES)}")
        yield from positive_rules(
            self,
            "ppo_mini_batch_size",
            "ppo_max_token_len_per_gpu",
            "forward_max_token_len_per_gpu",
            "ppo_epochs",
            "rollout_n",
            "loss_scale_factor",
            "nccl_timeout",
        )
        if not self.use_dynamic_bsz:
            yield from micro_batch_rules(self, "ppo_micro_batch_size")
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            yield Violation("loss_agg_mode", self.loss_agg_mode, f"must be one of {', '.join(LOSS_AGG_MODES)}")
        if self.cliprange_value <= 0:
            yield Violation("cliprange_value", self.cliprange_value, "must be above 0")

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """Check the batch sizes against the number of workers.

        Raises: ConfigError listing what does not fit.
        """
        violations = list(self.batch_rules(n_gpus, train_batch_size))
        if violations:
            raise ConfigError(violations)

    def batch_rules(self, n_gpus: int, train_batch_size: int) -> Iterator[Violation]:
        """Yield batch sizes that do not fit the training batch or the number of workers."""
        yield from mini_batch_rules(self, n_gpus, train_batch_size, self.get("ulysses_sequence_parallel_size", 1))


@dataclass
class FSDPCriticModelCfg(BaseModelConfig):
    """The model of the value function, on FSDP."""

    use_shm: bool = False
    enable_activation_offload: bool = False
    use_remove_padding: bool = False
    enable_gradient_checkpointing: bool = True
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    lora_rank: int = 0
    lora_alpha: int = 16
    target_modules: str | list[str] = "all-linear"
    freeze_vision_tower: bool = False
    custom_chat_template: str | None = None

    def rules(self) -> Iterator[Violation]:
        """Yield a negative adapter rank."""
        if self.lora_rank < 0:
            yield Violation("lora_rank", self.lora_rank, "must be 0 (no adapters) or more")

    def as_model_config(self) -> HFModelConfig:
        """Return the node from which an engine builds the value model."""
        own = ("_target_", "fsdp_config", "freeze_vision_tower")
        return HFModelConfig(**{name: value for name, value in self.items() if name not in own})


@dataclass
class FSDPCriticConfig(CriticConfig):
    """The value function under training, on FSDP."""

    _mutable_fields = CriticConfig._mutable_fields | {"forward_micro_batch_size", "forward_micro_batch_size_per_gpu"}

    strategy: str = "fsdp"
    optim: FSDPOptimizerConfig = field(default_factory=lambda: FSDPOptimizerConfig(lr=1e-5))
    model: FSDPCriticModelCfg = field(default_factory=FSDPCriticModelCfg)
    forward_micro_batch_size: int | None = None
    forward_micro_batch_size_per_gpu: int | None = None
    ulysses_sequence_parallel_size: int = 1
    grad_clip: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.model["fsdp_config"]

    def rules(self) -> Iterator[Violation]:
        """Yield what ``CriticConfig`` does, and sequence parallelism without padding removal."""
        yield from super().rules()
        yield from fsdp_role_rules(self)
        yield from positive_rules(self, "forward_micro_batch_size", "forward_micro_batch_size_per_gpu")
        if self.ulysses_sequence_parallel_size > 1 and not self.model["use_remove_padding"]:
            yield Violation(
                "ulysses_sequence_parallel_size",
                self.ulysses_sequence_parallel_size,
                "needs packed sequences: set critic.model.use_remove_padding=true",
            )

    def optimizer(self) -> FSDPOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        merged: FSDPOptimizerConfig = merged_optimizer(self.optim, self.grad_clip)
        return merged
