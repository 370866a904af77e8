"""The actor: batches, loss, optimizer and engine of the policy."""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.algos.names import FULL_KL, KL_ESTIMATORS, LOSS_AGG_MODES
from verl.base_config import BaseConfig, ConfigError, Violation
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.checkpoint import CheckpointConfig
from verl.workers.config.engine import STRATEGIES, FSDPEngineConfig
from verl.workers.config.optimizer import FSDPOptimizerConfig, OptimizerConfig

DEFAULT_CLIP_RATIO = 0.2


def micro_batch_rules(node: Mapping[str, Any], global_key: str, switch: str = "use_dynamic_bsz") -> Iterator[Violation]:
    """Yield what is wrong with a micro-batch size that is given per device or, deprecated, globally.

    ``switch`` is the key of dynamic batches, which need no such size.
    """
    per_gpu_key = f"{global_key}_per_gpu"
    for key in (global_key, per_gpu_key):
        value = node.get(key)
        if value is not None and value < 1:
            yield Violation(key, value, "must be 1 or more")
    if node.get(global_key) is not None and node.get(per_gpu_key) is not None:
        yield Violation(
            global_key, node.get(global_key), f"is deprecated and excludes {per_gpu_key}: set only {per_gpu_key}"
        )
    if node.get(global_key) is None and node.get(per_gpu_key) is None:
        yield Violation(per_gpu_key, None, f"set {per_gpu_key}, or {switch}=true")


def positive_rules(config: BaseConfig, *keys: str) -> Iterator[Violation]:
    """Yield those of the given integers that are below one."""
    for key in keys:
        if config[key] is not None and config[key] < 1:
            yield Violation(key, config[key], "must be 1 or more")


def merged_optimizer(optim: OptimizerConfig, grad_clip: float) -> Any:
    """Return the optimizer of a role, whose gradient-norm limit stands in the role's node and in ``optim``: the one
    that was changed from the common default counts.
    """
    clip_grad = grad_clip if grad_clip != 1.0 else optim.clip_grad
    return dataclasses.replace(optim, clip_grad=clip_grad, grad_clip=None)


@dataclass
class PolicyLossConfig(BaseConfig):
    """Which registered policy loss, and its parameters."""

    loss_mode: str = "vanilla"
    clip_cov_ratio: float | None = 0.0002
    clip_cov_lb: float | None = 1.0
    clip_cov_ub: float | None = 5.0
    kl_cov_ratio: float | None = 0.0002
    ppo_kl_coef: float | None = 0.1
    tau_pos: float = 1.0
    tau_neg: float = 1.05

    def rules(self) -> Iterator[Violation]:
        """Yield values outside their range."""
        for key in ("clip_cov_ratio", "kl_cov_ratio"):
            if self[key] is not None and not 0 < self[key] <= 1:
                yield Violation(key, self[key], "must be above 0 and at most 1, a share of the tokens")
        lower, upper = self.clip_cov_lb, self.clip_cov_ub
        if lower is not None and upper is not None and lower >= upper:
            yield Violation("clip_cov_ub", upper, f"must be above clip_cov_lb={lower}")
        if self.ppo_kl_coef is not None and self.ppo_kl_coef < 0:
            yield Violation("ppo_kl_coef", self.ppo_kl_coef, "must be 0 or more")
        for key in ("tau_pos", "tau_neg"):
            if not self[key] > 0:
                yield Violation(key, self[key], "must be above 0")


@dataclass
class ActorConfig(BaseConfig):
    """The policy under training, whatever its engine."""

    _mutable_fields = frozenset(
        {
            "ppo_mini_batch_size",
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_infer_micro_batch_size_per_gpu",
            "engine",
            "model_config",
        }
    )

    strategy: str = "???"
    ppo_mini_batch_size: int = 256
    ppo_micro_batch_size: int | None = None
    ppo_micro_batch_size_per_gpu: int | None = None
    ppo_infer_micro_batch_size_per_gpu: int | None = None
    use_dynamic_bsz: bool = False
    ppo_max_token_len_per_gpu: int = 16384
    ppo_infer_max_token_len_per_gpu: int = 16384
    clip_ratio: float = DEFAULT_CLIP_RATIO
    clip_ratio_low: float = DEFAULT_CLIP_RATIO
    clip_ratio_high: float = DEFAULT_CLIP_RATIO
    freeze_vision_tower: bool = False
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    clip_ratio_c: float = 3.0
    loss_agg_mode: str = "token-mean"
    loss_scale_factor: int | None = None
    entropy_coeff: float = 0
    use_kl_loss: bool = False
    use_torch_compile: bool = True
    kl_loss_coef: float = 0.001
    kl_loss_type: str = "low_var_kl"
    ppo_epochs: int = 1
    shuffle: bool = False
    data_loader_seed: int | None = 1
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    use_fused_kernels: bool = False
    profiler: ProfilerConfig | None = field(default_factory=ProfilerConfig)
    engine: BaseConfig = field(default_factory=BaseConfig)
    rollout_n: int = 1
    model_config: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("clip_ratio_low", "clip_ratio_high"):
            if self[key] == DEFAULT_CLIP_RATIO:  # a symmetric range is given by clip_ratio alone
                self.__dict__[key] = self.clip_ratio

    def rules(self) -> Iterator[Violation]:
        """Yield unknown names, batch sizes that exclude each other, and values outside their range."""
        if self.strategy == "???":
            yield Violation("strategy", self.strategy, f"is missing: write one of {', '.join(STRATEGIES)}")
        sizes = ("ppo_mini_batch_size", "ppo_max_token_len_per_gpu", "ppo_epochs", "rollout_n", "loss_scale_factor")
        yield from positive_rules(self, *sizes)
        if not self.use_dynamic_bsz:
            yield from micro_batch_rules(self, "ppo_micro_batch_size")
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            yield Violation("loss_agg_mode", self.loss_agg_mode, f"must be one of {', '.join(LOSS_AGG_MODES)}")
        if self.kl_loss_type != FULL_KL and self.kl_loss_type.removesuffix("+") not in KL_ESTIMATORS:
            expected = f"must be one of {', '.join(KL_ESTIMATORS)}, or one with a +, or {FULL_KL}"
            yield Violation("kl_loss_type", self.kl_loss_type, expected)
        for key in ("clip_ratio", "clip_ratio_low", "clip_ratio_high"):
            if not self[key] >= 0:
                yield Violation(key, self[key], "must be 0 or more")
        if not self.clip_ratio_c > 1:
            yield Violation("clip_ratio_c", self.clip_ratio_c, "must be above 1")

    @property
    def uses_full_kl(self) -> bool:
        """Whether the loss compares whole distributions, for which the actor's engine needs the reference."""
        return self.use_kl_loss and self.kl_loss_type == FULL_KL

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Any = None) -> None:
        """Check the batch sizes against the number of workers.

        Raises: ConfigError listing what does not fit.
        """
        violations = list(self.batch_rules(n_gpus, train_batch_size)) + list(self.model_rules(model_config or {}))
        if violations:
            raise ConfigError(violations)

    def batch_rules(self, n_gpus: int, train_batch_size: int) -> Iterator[Violation]:
        """Yield batch sizes that do not fit the training batch or the number of workers."""
        yield from mini_batch_rules(self, n_gpus, train_batch_size, self.get("ulysses_sequence_parallel_size", 1))

    def model_rules(self, model_config: Any) -> Iterator[Violation]:
        """Yield what does not fit the model node."""
        return iter(())


def mini_batch_rules(
    config: Mapping[str, Any], n_gpus: int, train_batch_size: int, sp_size: int, batch_key: str = "train_batch_size"
) -> Iterator[Violation]:
    """Yield mini- and global micro-batch sizes that do not fit; ``batch_key`` is the key of the batch in ``data``."""
    mini = config["ppo_mini_batch_size"]
    micro = config["ppo_micro_batch_size"]
    if train_batch_size < mini:
        yield Violation("ppo_mini_batch_size", mini, f"must be at most data.{batch_key}={train_batch_size}: lower it")
    if config["use_dynamic_bsz"] or micro is None:
        return
    if mini % micro:
        yield Violation("ppo_micro_batch_size", micro, f"must divide ppo_mini_batch_size={mini}")
    if micro * sp_size < n_gpus:
        expected = f"times ulysses_sequence_parallel_size={sp_size} must be at least the {n_gpus} workers"
        yield Violation("ppo_micro_batch_size", micro, f"{expected}: set ppo_micro_batch_size_per_gpu instead")


def ulysses_rules(config: Mapping[str, Any], model: Mapping[str, Any]) -> Iterator[Violation]:
    """Yield sequence parallelism of an actor without padding removal."""
    packed = config["use_remove_padding"] or model.get("use_remove_padding", False)
    if config["ulysses_sequence_parallel_size"] > 1 and not packed:
        yield Violation(
            "ulysses_sequence_parallel_size",
            config["ulysses_sequence_parallel_size"],
            "needs packed sequences: set actor_rollout_ref.model.use_remove_padding=true",
        )


@dataclass
class FSDPActorConfig(ActorConfig):
    """The policy under training, on FSDP."""

    strategy: str = "fsdp"
    grad_clip: float = 1.0
    ulysses_sequence_parallel_size: int = 1
    entropy_from_logits_with_chunking: bool = False
    entropy_checkpointing: bool = False
    optim: FSDPOptimizerConfig = field(default_factory=lambda: FSDPOptimizerConfig(lr=1e-6))
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    use_remove_padding: bool = False
    use_rollout_log_probs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.fsdp_config

    def rules(self) -> Iterator[Violation]:
        """Yield what ``ActorConfig`` does, unknown strategies and sizes below one."""
        yield from super().rules()
        yield from fsdp_role_rules(self)

    def model_rules(self, model_config: Any) -> Iterator[Violation]:
        """Yield sequence parallelism without padding removal."""
        yield from ulysses_rules(self, model_config)

    def optimizer(self) -> FSDPOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        merged: FSDPOptimizerConfig = merged_optimizer(self.optim, self.grad_clip)
        return merged


def async_save_rules(prefix: str, async_save: bool, strategy: str) -> Iterator[Violation]:
    """Yield a save beside training that the engine does not know; ``prefix`` is that of the key."""
    if async_save and strategy != "megatron":
        yield Violation.unsupported(
            f"{prefix}async_save", True, f"is not supported with strategy={strategy}: write false"
        )


def fsdp_role_rules(config: Any) -> Iterator[Violation]:
    """Yield what is wrong with the keys that every role on FSDP has."""
    if config.strategy not in STRATEGIES:
        expected = f"must be one of {', '.join(STRATEGIES)}; megatron is chosen by --config-name=ppo_megatron_trainer"
        yield Violation("strategy", config.strategy, expected)
    if config.grad_clip <= 0:
        yield Violation("grad_clip", config.grad_clip, "must be above 0; write a large number to clip nothing")
    yield from async_save_rules("checkpoint.", config.checkpoint.async_save, config.strategy)
    yield from positive_rules(config, "ulysses_sequence_parallel_size")
