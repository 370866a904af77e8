"""The roles that train, actor and critic: batches, loss, optimizer, model, engine, and the contents of a checkpoint."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.algos.names import FULL_KL, KL_ESTIMATORS, LOSS_AGG_MODES, POLICY_LOSS_ALIASES
from verl.base_config import MOST_SEED, BaseConfig, ConfigError, Violation, setting
from verl.utils.checkpoint.files import CONTENTS, DEFAULT_CONTENTS
from verl.utils.json_types import Json
from verl.utils.profiler.config import ProfilerConfig
from verl.workers.config.engine import NCCL_TIMEOUT_S, STRATEGIES, FSDPEngineConfig, McoreEngineConfig
from verl.workers.config.model import BaseModelConfig
from verl.workers.config.optimizer import CLIP_NOTHING, FSDPOptimizerConfig, McoreOptimizerConfig, OptimizerConfig

DEFAULT_CLIP_RATIO = 0.2
OTHER_TRAINER = "megatron is chosen by --config-name=ppo_megatron_trainer"
OTHER_STRATEGIES = "ppo_trainer has the others"


def micro_batch_rules(
    node: Mapping[str, Json], global_key: str, switch: str = "use_dynamic_bsz"
) -> Iterator[Violation]:
    """Yield faults of a micro-batch size, given per device or (deprecated) for all.

    ``switch`` is the key of dynamic batches, which need no such size.
    """
    per_gpu_key = f"{global_key}_per_gpu"
    value = node.get(global_key)
    per_gpu = node.get(per_gpu_key)
    if value is not None and per_gpu is not None:
        yield Violation(global_key, value, f"is deprecated and excludes {per_gpu_key}: set only {per_gpu_key}")
    if value is None and per_gpu is None:
        yield Violation(per_gpu_key, None, f"set {per_gpu_key}, or {switch}=true")


def packing_rules(sp_size: int, is_packed: bool, model: str) -> Iterator[Violation]:
    """Yield sequence parallelism without padding removal; ``model`` is the key of the role's model."""
    if sp_size > 1 and not is_packed:
        expected = f"needs packed sequences: set {model}.use_remove_padding=true"
        yield Violation("ulysses_sequence_parallel_size", sp_size, expected)


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


def async_save_rules(async_save: bool, strategy: str) -> Iterator[Violation]:
    """Yield ``checkpoint.async_save`` with an engine that does not support it."""
    if async_save and strategy != "megatron":
        expected = f"is not supported with strategy={strategy}: write false"
        yield Violation.unsupported("checkpoint.async_save", True, expected)


@dataclass
class CheckpointConfig(BaseConfig):
    """The parts of a checkpoint to save and to restore."""

    save_contents: list[str] = setting([*DEFAULT_CONTENTS], "parts to save")
    load_contents: list[str] = setting([*DEFAULT_CONTENTS], "parts to restore")
    async_save: bool = setting(False, "train on while a checkpoint is written")

    def rules(self) -> Iterator[Violation]:
        """Yield parts that do not exist."""
        for key in ("save_contents", "load_contents"):
            unknown = [part for part in getattr(self, key) if part not in CONTENTS]
            if unknown:
                expected = f"has unknown parts {', '.join(unknown)}: write parts of [{','.join(CONTENTS)}]"
                yield Violation(key, getattr(self, key), expected)


@dataclass
class TrainedConfig(BaseConfig):
    """A role that trains, on any engine."""

    _mutable_fields = frozenset(
        {"ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "engine", "model_config"}
    )

    strategy: str = setting("???", "training engine")
    ppo_mini_batch_size: int = setting(256, "prompts of one optimizer step", at_least=1)
    ppo_micro_batch_size: int | None = setting(None, "deprecated: sequences of a pass over all workers", at_least=1)
    ppo_micro_batch_size_per_gpu: int | None = setting(None, "sequences of a pass of one worker", at_least=1)
    ppo_infer_micro_batch_size_per_gpu: int | None = setting(None, "sequences of a log-prob pass; null: as in training")
    use_dynamic_bsz: bool = setting(False, "fill a pass up to a number of tokens")
    ppo_epochs: int = setting(1, "passes over a batch", at_least=1, at_most=1000)
    shuffle: bool = setting(False, "draw mini-batches in random order")
    data_loader_seed: int | None = setting(1, "seed of that order", at_most=MOST_SEED)
    loss_agg_mode: str = setting("token-mean", "how token losses become one number")
    loss_scale_factor: int | None = setting(None, "divisor of seq-mean-token-sum-norm; null: the width", at_least=1)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    optim: OptimizerConfig = field(default_factory=OptimizerConfig)
    profiler: ProfilerConfig | None = field(default_factory=ProfilerConfig)
    engine: BaseConfig = field(default_factory=BaseConfig)
    rollout_n: int = setting(1, "responses of one prompt", at_least=1)
    model_config: Any = setting(None, "model node of the role")

    def rules(self) -> Iterator[Violation]:
        """Yield a missing strategy, unsupported asynchronous saving, and micro-batch sizes that exclude each other."""
        if self.strategy == "???":
            yield Violation("strategy", "???", f"is missing: write one of {', '.join(STRATEGIES)}")
        else:
            yield from async_save_rules(self.checkpoint.async_save, self.strategy)
        if not self.use_dynamic_bsz:
            yield from micro_batch_rules(self, "ppo_micro_batch_size")
        if self.loss_agg_mode not in LOSS_AGG_MODES:
            expected = f"Invalid loss_agg_mode: must be one of {', '.join(LOSS_AGG_MODES)}"
            yield Violation("loss_agg_mode", self.loss_agg_mode, expected)


@dataclass
class PolicyLossConfig(BaseConfig):
    """The registered policy loss and its parameters."""

    loss_mode: str = setting("vanilla", "name of the loss")
    clip_cov_ratio: float | None = setting(0.0002, "share of the tokens that clip_cov clips", above=0, at_most=1)
    clip_cov_lb: float | None = setting(1.0, "least covariance that clip_cov clips")
    clip_cov_ub: float | None = setting(5.0, "largest covariance that clip_cov clips")
    kl_cov_ratio: float | None = setting(0.0002, "share of the tokens with a KL term in kl_cov", above=0, at_most=1)
    ppo_kl_coef: float | None = setting(0.1, "weight of that KL term", at_least=0)
    tau_pos: float = setting(1.0, "temperature of sapo for positive advantages", above=0)
    tau_neg: float = setting(1.05, "temperature of sapo for negative advantages", above=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["loss_mode"] = POLICY_LOSS_ALIASES.get(str(self.loss_mode), self.loss_mode)

    def rules(self) -> Iterator[Violation]:
        """Yield an empty range of covariances."""
        lower = self.clip_cov_lb
        upper = self.clip_cov_ub
        if lower is not None and upper is not None and lower >= upper:
            yield Violation("clip_cov_ub", upper, f"must be above clip_cov_lb={lower}")


@dataclass
class ActorConfig(TrainedConfig):
    """The policy under training, on any engine."""

    _mutable_fields = TrainedConfig._mutable_fields | {"ppo_infer_micro_batch_size_per_gpu"}
    _replaced = {
        "tis_imp_ratio_cap": "was replaced: leave it out if it is -1, which meant off; else write "
        "algorithm.rollout_is_threshold=<cap>, algorithm.rollout_is=true, algorithm.rollout_is_mode=truncate and "
        "algorithm.rollout_is_veto_threshold=null",
        "profile": "was replaced: write actor_rollout_ref.actor.profiler.enable=true, global_profiler.tool=torch and "
        "global_profiler.steps=[...]",
    }

    ppo_max_token_len_per_gpu: int = setting(16384, "tokens of a pass of one worker", at_least=1)
    ppo_infer_max_token_len_per_gpu: int = setting(16384, "tokens of a log-prob pass of one worker")
    clip_ratio: float = setting(DEFAULT_CLIP_RATIO, "how far the probability ratio may leave 1", at_least=0)
    clip_ratio_low: float = setting(DEFAULT_CLIP_RATIO, "how far below 1", at_least=0)
    clip_ratio_high: float = setting(DEFAULT_CLIP_RATIO, "how far above 1", at_least=0)
    freeze_vision_tower: bool = setting(False, "freeze the vision tower")
    policy_loss: PolicyLossConfig = field(default_factory=PolicyLossConfig)
    clip_ratio_c: float = setting(3.0, "dual clip: loss limit at negative advantages, times -advantage", above=1)
    entropy_coeff: float = setting(0, "weight of the entropy bonus")
    use_kl_loss: bool = setting(False, "add the KL to the reference policy to the loss")
    use_torch_compile: bool = setting(True, "no effect: there is one implementation")
    kl_loss_coef: float = setting(0.001, "weight of that KL")
    kl_loss_type: str = setting("low_var_kl", "estimator of that KL")
    use_fused_kernels: bool = setting(False, "follows actor_rollout_ref.model.use_fused_kernels")
    use_prefix_grouper: bool = setting(False, "another name of actor_rollout_ref.model.use_prefix_sharing")
    use_rollout_log_probs: bool = setting(False, "the log-probs of the rollout are the old ones")

    def __post_init__(self) -> None:
        super().__post_init__()
        for key in ("clip_ratio_low", "clip_ratio_high"):
            if self[key] == DEFAULT_CLIP_RATIO:  # a symmetric range is given by clip_ratio alone
                self.__dict__[key] = self.clip_ratio

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of ``TrainedConfig``, and reject an unknown estimator of the KL."""
        yield from super().rules()
        if self.kl_loss_type != FULL_KL and self.kl_loss_type.removesuffix("+") not in KL_ESTIMATORS:
            expected = f"must be one of {', '.join(KL_ESTIMATORS)}, or one with a +, or {FULL_KL}"
            yield Violation("kl_loss_type", self.kl_loss_type, expected)

    @property
    def needs_reference(self) -> bool:
        """Whether the update reads a reference policy."""
        return self.use_kl_loss

    @property
    def holds_reference(self) -> bool:
        """Whether the reference policy is a model in the actor's workers."""
        return self.uses_full_kl

    @property
    def uses_full_kl(self) -> bool:
        """Whether the loss compares whole distributions; the actor's engine then needs the reference model."""
        return self.use_kl_loss and self.kl_loss_type == FULL_KL

    def validate(self, n_gpus: int, train_batch_size: int, model_config: Mapping[str, Json] | None = None) -> None:
        """Check the batch sizes against the number of workers, and that sequences are packed where they are shared.

        Raises: ConfigError listing what does not fit.
        """
        sp_size = self.get("ulysses_sequence_parallel_size", 1)
        is_packed = bool(self.get("use_remove_padding") or (model_config or {}).get("use_remove_padding"))
        violations = list(mini_batch_rules(self, n_gpus, train_batch_size, sp_size))
        violations += packing_rules(sp_size, is_packed, "actor_rollout_ref.model")
        if violations:
            raise ConfigError(violations)


@dataclass
class FSDPActorConfig(ActorConfig):
    """The policy under training, on FSDP."""

    strategy: str = setting("fsdp", "training engine", one_of=STRATEGIES, hint=OTHER_TRAINER)
    grad_clip: float = setting(1.0, "limit of the gradient norm", above=0, hint=CLIP_NOTHING)
    ulysses_sequence_parallel_size: int = setting(1, "workers that share each sequence", at_least=1)
    entropy_from_logits_with_chunking: bool = setting(False, "compute log-probs some rows at a time")
    entropy_from_logits_chunk_size: int = setting(2048, "those rows", at_least=1)
    entropy_checkpointing: bool = setting(False, "no effect: there is one implementation")
    optim: FSDPOptimizerConfig = field(default_factory=lambda: FSDPOptimizerConfig(lr=1e-6))
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    use_remove_padding: bool = setting(False, "follows actor_rollout_ref.model.use_remove_padding")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.fsdp_config

    def optimizer(self) -> FSDPOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        return self.optim.limited(self.grad_clip)


@dataclass
class McoreActorConfig(ActorConfig):
    """The policy under training, on Megatron-Core."""

    strategy: str = setting("megatron", "training engine", one_of=("megatron",), hint=OTHER_STRATEGIES)
    optim: McoreOptimizerConfig = field(default_factory=lambda: McoreOptimizerConfig(lr=1e-6))
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    data_loader_seed: int | None = setting(None, "seed of the order of shuffled rows; null: 0", at_most=MOST_SEED)
    load_weight: bool = setting(True, "load the weights of model.path; false starts from random ones")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatron

    def optimizer(self) -> McoreOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        return self.optim.limited(1.0)


@dataclass
class CriticConfig(TrainedConfig):
    """The value function under training, on any engine."""

    _mutable_fields = TrainedConfig._mutable_fields | {"forward_micro_batch_size", "forward_micro_batch_size_per_gpu"}

    enable: bool | None = setting(None, "train a critic; null: if the estimator needs one")
    model: BaseModelConfig = field(default_factory=BaseModelConfig)
    ppo_max_token_len_per_gpu: int = setting(32768, "tokens of a pass of one worker", at_least=1)
    ppo_infer_max_token_len_per_gpu: int = setting(32768, "tokens of a pass without gradient of one worker")
    forward_micro_batch_size: int | None = setting(None, "deprecated: as ppo_micro_batch_size", at_least=1)
    forward_micro_batch_size_per_gpu: int | None = setting(None, "sequences of a forward pass", at_least=1)
    forward_max_token_len_per_gpu: int = setting(32768, "tokens of a forward pass of one worker", at_least=1)
    cliprange_value: float = setting(0.5, "how far a value may leave its old one", above=0)
    nccl_timeout: int = setting(NCCL_TIMEOUT_S, "seconds that a collective may take", at_least=1)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model_config is None:
            self.model_config = self.model

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

    enable_activation_offload: bool = setting(False, "keep activations in CPU memory")
    use_remove_padding: bool = setting(False, "pack sequences instead of padding them")
    use_prefix_sharing: bool = setting(False, "compute tokens that rows begin with once")
    fsdp_config: FSDPEngineConfig = field(default_factory=FSDPEngineConfig)
    lora_rank: int = setting(0, "rank of the adapters; 0: none", at_least=0)
    lora_alpha: int = setting(16, "scale of the adapters, divided by their rank")
    target_modules: str | list[str] = setting("all-linear", "modules with adapters")
    freeze_vision_tower: bool = setting(False, "freeze the vision tower")
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
        """Apply the rules of ``TrainedConfig``, and reject sequence parallelism without padding removal."""
        yield from super().rules()
        is_packed = self.model["use_remove_padding"]
        yield from packing_rules(self.ulysses_sequence_parallel_size, is_packed, "critic.model")

    def optimizer(self) -> FSDPOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        return self.optim.limited(self.grad_clip)


@dataclass
class McoreCriticModelConfig(BaseModelConfig):
    """The model of the value function, on Megatron-Core."""

    use_prefix_sharing: bool = setting(False, "compute tokens that rows begin with once")


@dataclass
class McoreCriticConfig(CriticConfig):
    """The value function under training, on Megatron-Core."""

    strategy: str = setting("megatron", "training engine", one_of=("megatron",), hint=OTHER_STRATEGIES)
    optim: McoreOptimizerConfig = field(default_factory=lambda: McoreOptimizerConfig(lr=1e-5))
    model: McoreCriticModelConfig = field(default_factory=McoreCriticModelConfig)
    megatron: McoreEngineConfig = field(default_factory=McoreEngineConfig)
    data_loader_seed: int | None = setting(None, "seed of the order of shuffled rows; null: 0", at_most=MOST_SEED)
    load_weight: bool = setting(True, "load the weights of model.path; false starts from random ones")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.engine = self.megatron

    def optimizer(self) -> McoreOptimizerConfig:
        """Return the optimizer with the gradient-norm limit that counts."""
        return self.optim.limited(1.0)
