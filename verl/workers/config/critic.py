"""The critic: batches, loss, optimizer, model and engine of the value function."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.algos.names import LOSS_AGG_MODES
from verl.base_config import BaseConfig, ConfigError, Violation, setting
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.actor import OTHER_TRAINER, async_save_rules, mini_batch_rules, packing_rules, role_rules
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.engine import NCCL_TIMEOUT_S, STRATEGIES, FSDPEngineConfig
from verl.workers.config.model import BaseModelConfig
from verl.workers.config.optimizer import CLIP_NOTHING, FSDPOptimizerConfig, OptimizerConfig


@dataclass
class CriticConfig(BaseConfig):
    """The value function under training, whatever its engine."""

    _mutable_fields = frozenset(
        {
            "ppo_micro_batch_size_per_gpu",
            "ppo_mini_batch_size",
            "ppo_micro_batch_size",
            "forward_micro_batch_size",
            "forward_micro_batch_size_per_gpu",
            "model_config",
            "engine",
        }
    )

    rollout_n: int = setting(1, "responses of one prompt", at_least=1)
    strategy: str = setting("???", "training engine")
    enable: bool | None = setting(None, "train a critic; null: if the estimator needs one")
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    model: BaseModelConfig = field(default_factory=BaseModelConfig)
    ppo_mini_batch_size: int = setting(256, "prompts of one optimizer step", at_least=1)
    ppo_micro_batch_size: int | None = setting(None, "deprecated: sequences of a pass over all workers", at_least=1)
    ppo_micro_batch_size_per_gpu: int | None = setting(None, "sequences of a pass of one worker", at_least=1)
    ppo_infer_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = setting(False, "fill a pass up to a number of tokens")
    ppo_max_token_len_per_gpu: int = setting(32768, "tokens of a pass of one worker", at_least=1)
    ppo_infer_max_token_len_per_gpu: int = 32768
    forward_micro_batch_size: int | None = setting(None, "deprecated: as ppo_micro_batch_size", at_least=1)
    forward_micro_batch_size_per_gpu: int | None = setting(None, "sequences of a forward pass", at_least=1)
    forward_max_token_len_per_gpu: int = setting(32768, "tokens of a forward pass of one worker", at_least=1)
    ppo_epochs: int = setting(1, "passes over a batch", at_least=1)
    shuffle: bool = setting(False, "mini-batches are drawn in random order")
    data_loader_seed: int | None = setting(1, "seed of that order")
    cliprange_value: float = setting(0.5, "how far a value may leave its old one", above=0)
    loss_agg_mode: str = setting("token-mean", "how token losses become one number", one_of=LOSS_AGG_MODES)
    loss_scale_factor: int | None = setting(None, "divisor of seq-mean-token-sum-norm; null: the width", at_least=1)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    profiler: ProfilerConfig | None = field(default_factory=ProfilerConfig)
    engine: BaseConfig = field(default_factory=BaseConfig)
    model_config: Any = None
    nccl_timeout: int = setting(NCCL_TIMEOUT_S, "seconds that a collective may take", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_config is None:
            self.model_config = self.model

    def rules(self) -> Iterator[Violation]:
        """Yield what is wrong with any role that trains."""
        return role_rules(self)

    def validate(self, n_gpus: int, train_batch_size: int) -> None:
        """Check the batch sizes against the number of workers.

        Raises: ConfigError listing what does not fit.
        """
        sp_size = self.get("ulysses_sequence_parallel_size", 1)
        violations = list(mini_batch_rules(self, n_gpus, train_batch_size, sp_size))
        if violations:
            raise ConfigError(violations)


@dataclass
class FSDPCriticModelCfg(BaseModelConfig):
    """The model of the value function, on FSDP."""

    use_shm: bool = setting(False, "load from a copy in shared memory")
    enable_activation_offload: bool = setting(False, "keep activations in CPU memory")
    use_remove_padding: bool = setting(False, "pack sequences instead of padding them")
    enable_gradient_checkpointing: bool = setting(True, "compute activations again in the backward pass")
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    lora_rank: int = setting(0, "rank of the adapters; 0: none", at_least=0)
    lora_alpha: int = setting(16, "scale of the adapters, divided by their rank")
    target_modules: str | list[str] = setting("all-linear", "modules with adapters")
    freeze_vision_tower: bool = setting(False, "stop gradients in the vision tower")
    custom_chat_template: str | None = setting(None, "Jinja text instead of the chat template")


@dataclass
class FSDPCriticConfig(CriticConfig):
    """The value function under training, on FSDP."""

    strategy: str = setting("fsdp", "training engine", one_of=STRATEGIES, hint=OTHER_TRAINER)
    optim: FSDPOptimizerConfig = field(default_factory=lambda: FSDPOptimizerConfig(lr=1e-5))
    model: FSDPCriticModelCfg = field(default_factory=FSDPCriticModelCfg)
    ulysses_sequence_parallel_size: int = setting(1, "workers that share each sequence", at_least=1)
    grad_clip: float = setting(1.0, "limit of the gradient norm", above=0, hint=CLIP_NOTHING)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.model["fsdp_config"]

    def rules(self) -> Iterator[Violation]:
        """Yield what ``CriticConfig`` does, asynchronous saving, and sequence parallelism without padding removal."""
        yield from super().rules()
        yield from async_save_rules(self.checkpoint.async_save, self.strategy)
        is_packed = self.model["use_remove_padding"]
        yield from packing_rules(self.ulysses_sequence_parallel_size, is_packed, "critic.model")

    def optimizer(self) -> FSDPOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        return self.optim.limited(self.grad_clip)
