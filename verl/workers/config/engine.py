"""Sharding, offload and precision of a training engine."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from verl.base_config import MOST_SEED, BaseConfig, Violation, matches, setting

STRATEGIES = ("fsdp", "fsdp2")
ALL_STRATEGIES = (*STRATEGIES, "megatron")
DEVICES = ("cuda", "cpu", "npu")
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
MCORE_DTYPES = ("fp32", "float32", "bf16", "bfloat16")
PRECISION_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")


_WRAP_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_num_params": (lambda value: matches(value, int) and value >= 0, "must be an integer of 0 or more"),
    "disable": (lambda value: matches(value, bool), "must be true or false"),
    "transformer_layer_cls_to_wrap": (
        lambda value: matches(value, str | list[str | None]),
        "must be the name of a class, or a list of names",
    ),
}

NCCL_TIMEOUT_S = 600
"""Time limit of a collective if the configuration sets none."""


@dataclass
class FSDPEngineConfig(BaseConfig):
    """One FSDP engine."""

    wrap_policy: dict[str, Any] = setting({"min_num_params": 0}, "which modules become one sharding unit")
    param_offload: bool = setting(False, "keep the weights in CPU memory between tasks")
    optimizer_offload: bool = setting(False, "keep the optimizer's state in CPU memory between tasks")
    offload_policy: bool = setting(False, "keep weights and state in CPU memory during tasks too")
    reshard_after_forward: bool = setting(True, "free gathered weights after the forward pass")
    fsdp_size: int = setting(-1, "ranks of a shard group; -1: all")
    forward_prefetch: bool = setting(False, "gather the next layer during the forward pass")
    model_dtype: str = setting("fp32", "dtype of the weights in memory", one_of=DTYPES)
    use_orig_params: bool = setting(False, "no effect: there is one implementation")
    ulysses_sequence_parallel_size: int = setting(1, "workers that share each sequence", at_least=1)
    entropy_from_logits_with_chunking: bool = setting(False, "compute log-probs some rows at a time")
    entropy_from_logits_chunk_size: int = setting(2048, "those rows", at_least=1)
    full_determinism: bool = setting(False, "torch uses deterministic algorithms in this process")
    use_torch_compile: bool = setting(True, "no effect: there is one implementation")
    entropy_checkpointing: bool = setting(False, "no effect: there is one implementation")
    forward_only: bool = setting(False, "there is no optimizer")
    strategy: str = setting("fsdp", "training engine", one_of=STRATEGIES)
    mixed_precision: dict[str, Any] | None = setting(None, "dtypes of computation, reduction and buffers")
    seed: int = setting(42, "seed of random weights and of dropout", at_most=MOST_SEED)

    def rules(self) -> Iterator[Violation]:
        """Yield a size below one, and unknown keys and dtypes."""
        if self.fsdp_size != -1 and self.fsdp_size < 1:
            yield Violation("fsdp_size", self.fsdp_size, "must be -1 (shard over all ranks) or 1 or more")
        for key, value in self.wrap_policy.items():
            if key not in _WRAP_CHECKS:
                expected = f"unknown key: write one of {', '.join(_WRAP_CHECKS)}"
                yield Violation(f"wrap_policy.{key}", value, expected)
            elif value is not None and not _WRAP_CHECKS[key][0](value):
                yield Violation(f"wrap_policy.{key}", value, _WRAP_CHECKS[key][1])
        for key, dtype in (self.mixed_precision or {}).items():
            if key not in PRECISION_KEYS:
                expected = f"unknown key: write one of {', '.join(PRECISION_KEYS)}"
                yield Violation(f"mixed_precision.{key}", dtype, expected)
            elif dtype not in DTYPES:
                yield Violation(f"mixed_precision.{key}", dtype, f"must be one of {', '.join(DTYPES)}")


OVERRIDE_VALUES = {
    "recompute_granularity": ("full", "selective"),
    "recompute_method": ("uniform", "block"),
    "attention_backend": ("flash", "fused", "unfused", "local", "auto"),
    "transformer_impl": ("local", "transformer_engine"),
    "moe_router_dtype": ("fp32", "fp64"),
}
"""The values of some fields of Megatron-Core."""
RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts", "moe_act", "layernorm", "mla_up_proj")
"""The names for ``recompute_modules``."""


_UNSET: dict[str, Any] = dict.fromkeys(("recompute_granularity", "recompute_method", "recompute_num_layers"))
TRANSFORMER_OVERRIDES = _UNSET | {"recompute_modules": ["core_attn"], "attention_backend": "flash"}


@dataclass
class McoreEngineConfig(BaseConfig):
    """One Megatron-Core engine."""

    _mutable_fields = frozenset({"sequence_parallel"})
    _is_closed = True

    param_offload: bool = setting(False, "keep the weights in CPU memory between tasks")
    grad_offload: bool = setting(False, "free the gradients between tasks")
    optimizer_offload: bool = setting(False, "keep the optimizer's state in CPU memory between tasks")
    tensor_model_parallel_size: int = setting(1, "ranks that share each layer", at_least=1)
    expert_model_parallel_size: int = setting(1, "ranks that share the experts", at_least=1)
    expert_tensor_parallel_size: int | None = setting(None, "ranks that share each expert", at_least=1)
    pipeline_model_parallel_size: int = setting(1, "stages of layers", at_least=1)
    virtual_pipeline_model_parallel_size: int | None = setting(None, "parts of each stage", at_least=2)
    context_parallel_size: int = setting(1, "ranks that share each sequence", at_least=1)
    sequence_parallel: bool = setting(True, "split activations between layers over the tensor-parallel ranks")
    use_distributed_optimizer: bool = setting(True, "shard the optimizer's state over the data-parallel ranks")
    use_dist_checkpointing: bool = setting(False, "load the weights of dist_checkpointing_path")
    dist_checkpointing_path: str | None = setting(None, "folder of weights in the format of Megatron-Core")
    seed: int = setting(42, "seed of random weights and of dropout", at_most=MOST_SEED)
    dtype: str | None = setting(None, "dtype of the weights; null: bf16 on GPUs, fp32 on CPUs", one_of=MCORE_DTYPES)
    override_ddp_config: dict[str, Any] = setting({}, "fields of DistributedDataParallelConfig to set")
    override_transformer_config: dict[str, Any] = setting(TRANSFORMER_OVERRIDES, "fields of TransformerConfig to set")
    override_mcore_model_config: dict[str, Any] = setting({}, "must be empty: use model.override_config")
    use_mbridge: bool = setting(False, "mbridge builds models that verl.models.mcore has no table for")
    share_model_files: bool = setting(False, "copy missing model files from other nodes")
    forward_only: bool = setting(False, "there is no optimizer")
    strategy: str = setting("megatron", "training engine", one_of=("megatron",))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tensor_model_parallel_size == 1 and self.sequence_parallel:
            warnings.warn(
                "megatron.sequence_parallel is off: it shares the work of tensor parallelism, and "
                "tensor_model_parallel_size is 1",
                stacklevel=2,
            )
            self.sequence_parallel = False

    def rules(self) -> Iterator[Violation]:
        """Yield options that exclude each other, are not supported, or change the model."""
        if self.use_dist_checkpointing and self.dist_checkpointing_path is None:
            yield Violation("dist_checkpointing_path", None, "must name a folder with use_dist_checkpointing=true")
        if self.override_mcore_model_config:
            expected = "would change training but not generation: set the keys of config.json in model.override_config"
            yield Violation("override_mcore_model_config", self.override_mcore_model_config, expected)
        if self.virtual_pipeline_model_parallel_size is not None:
            yield from self._stage_rules(self.virtual_pipeline_model_parallel_size)
        yield from self._ddp_rules()
        yield from self._choice_rules()

    def _stage_rules(self, stages: int) -> Iterator[Violation]:
        if self.pipeline_model_parallel_size < 2:
            expected = "needs pipeline_model_parallel_size of 2 or more: write null"
            yield Violation("virtual_pipeline_model_parallel_size", stages, expected)
        if self.override_transformer_config.get("batch_p2p_comm", False):
            expected = "must be false with virtual stages: Megatron-Core exchanges the wrong activations, silently"
            yield Violation("override_transformer_config.batch_p2p_comm", True, expected)
        if self.override_transformer_config.get("overlap_p2p_comm") is False:
            expected = "must be true with virtual stages (false is untested): leave it out"
            yield Violation("override_transformer_config.overlap_p2p_comm", False, expected)

    def _ddp_rules(self) -> Iterator[Violation]:
        options = self.override_ddp_config
        key = "override_ddp_config.overlap_param_gather"
        if options.get("overlap_param_gather") and not self.use_distributed_optimizer:
            expected = "needs megatron.use_distributed_optimizer=true: without it no sharded weights are gathered"
            yield Violation(key, True, expected)
        if options.get("overlap_param_gather") and not options.get("overlap_grad_reduce"):
            yield Violation(key, True, "needs overlap_grad_reduce=true too, which cuts the weights into buckets")
        own = options.get("use_distributed_optimizer", self.use_distributed_optimizer)
        if own != self.use_distributed_optimizer:
            expected = "belongs one level up: write megatron.use_distributed_optimizer"
            yield Violation("override_ddp_config.use_distributed_optimizer", own, expected)

    def _choice_rules(self) -> Iterator[Violation]:
        overrides = self.override_transformer_config
        modules = overrides.get("recompute_modules") or ()
        if unknown := [name for name in modules if name not in RECOMPUTED]:
            expected = f"names {', '.join(map(str, unknown))}: it may name {', '.join(RECOMPUTED)}"
            yield Violation("override_transformer_config.recompute_modules", modules, expected)
        for key, values in OVERRIDE_VALUES.items():
            if overrides.get(key) not in (None, *values):
                expected = f"must be null or one of {', '.join(values)}"
                yield Violation(f"override_transformer_config.{key}", overrides[key], expected)
