"""Sharding, offload and precision of a training engine."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig, Violation

STRATEGIES = ("fsdp", "fsdp2")
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
MCORE_DTYPES = ("fp32", "float32", "bf16", "bfloat16")
PRECISION_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")


def _is_count_or_null(value: Any) -> bool:
    return value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= 0)


def _is_name_or_names(value: Any) -> bool:
    names = [value] if value is None or isinstance(value, str) else value
    return isinstance(names, list | tuple) and all(name is None or isinstance(name, str) for name in names)


_WRAP_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "min_num_params": (_is_count_or_null, "must be an integer of 0 or more"),
    "disable": (lambda value: value is None or isinstance(value, bool), "must be true or false"),
    "transformer_layer_cls_to_wrap": (_is_name_or_names, "must be the name of a class, or a list of names"),
}
WRAP_KEYS = tuple(_WRAP_CHECKS)

NCCL_TIMEOUT_S = 600
"""How long a collective may take where no configuration says it."""


@dataclass
class FSDPEngineConfig(BaseConfig):
    """One FSDP engine."""

    wrap_policy: dict[str, Any] = field(default_factory=lambda: {"min_num_params": 0})
    param_offload: bool = False
    optimizer_offload: bool = False
    offload_policy: bool = False
    reshard_after_forward: bool = True
    fsdp_size: int = -1
    forward_prefetch: bool = False
    model_dtype: str = "fp32"
    use_orig_params: bool = False
    ulysses_sequence_parallel_size: int = 1
    entropy_from_logits_with_chunking: bool = False
    use_torch_compile: bool = True
    entropy_checkpointing: bool = False
    forward_only: bool = False
    strategy: str = "fsdp"
    mixed_precision: dict[str, Any] | None = None
    seed: int = 42

    def rules(self) -> Iterator[Violation]:
        """Yield unknown names and sizes below one."""
        if self.strategy not in STRATEGIES:
            yield Violation("strategy", self.strategy, f"must be one of {', '.join(STRATEGIES)}")
        if self.fsdp_size != -1 and self.fsdp_size < 1:
            yield Violation("fsdp_size", self.fsdp_size, "must be -1 (shard over all ranks) or 1 or more")
        if self.ulysses_sequence_parallel_size < 1:
            yield Violation("ulysses_sequence_parallel_size", self.ulysses_sequence_parallel_size, "must be 1 or more")
        if self.model_dtype not in DTYPES:
            yield Violation("model_dtype", self.model_dtype, f"must be one of {', '.join(DTYPES)}")
        for key, value in self.wrap_policy.items():
            if key not in WRAP_KEYS:
                yield Violation(f"wrap_policy.{key}", value, f"unknown key: write one of {', '.join(WRAP_KEYS)}")
            elif not _WRAP_CHECKS[key][0](value):
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
"""What some fields of Megatron-Core may be."""
RECOMPUTED = ("core_attn", "mlp", "moe", "shared_experts", "moe_act", "layernorm", "mla_up_proj")
"""What ``recompute_modules`` may name."""


def _default_transformer_overrides() -> dict[str, Any]:
    names = ("recompute_granularity", "recompute_method", "recompute_num_layers")
    return dict.fromkeys(names) | {"recompute_modules": ["core_attn"], "attention_backend": "flash"}


@dataclass
class McoreEngineConfig(BaseConfig):
    """One Megatron-Core engine."""

    _mutable_fields = frozenset({"sequence_parallel"})

    param_offload: bool = False
    grad_offload: bool = False
    optimizer_offload: bool = False
    tensor_model_parallel_size: int = 1
    expert_model_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    context_parallel_size: int = 1
    sequence_parallel: bool = True
    use_distributed_optimizer: bool = True
    use_dist_checkpointing: bool = False
    dist_checkpointing_path: str | None = None
    seed: int = 42
    dtype: str | None = None
    override_ddp_config: dict[str, Any] = field(default_factory=dict)
    override_transformer_config: dict[str, Any] = field(default_factory=_default_transformer_overrides)
    override_mcore_model_config: dict[str, Any] = field(default_factory=dict)
    use_mbridge: bool = False
    share_model_files: bool = False
    forward_only: bool = False
    strategy: str = "megatron"

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
        """Yield unknown names, sizes below one, and what is not supported yet."""
        if self.strategy != "megatron":
            yield Violation("strategy", self.strategy, "must be megatron")
        for axis in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor"):
            key = f"{axis}_parallel_size"
            if (size := getattr(self, key)) is not None and size < 1:
                yield Violation(key, size, "must be 1 or more")
        if self.dtype not in (None, *MCORE_DTYPES):
            yield Violation("dtype", self.dtype, f"must be null or one of {', '.join(MCORE_DTYPES)}")
        if self.use_dist_checkpointing != (self.dist_checkpointing_path is not None):
            missing = self.dist_checkpointing_path is None
            yield Violation(
                "dist_checkpointing_path", self.dist_checkpointing_path,
                "must name a folder with use_dist_checkpointing=true" if missing
                else "is read with use_dist_checkpointing=true only: write that, or null here",
            )  # fmt: skip
        yield from self._virtual_stages()
        yield from self._unsupported()

    def _virtual_stages(self) -> Iterator[Violation]:
        key, stages = "virtual_pipeline_model_parallel_size", self.virtual_pipeline_model_parallel_size
        if stages is None:
            return
        if stages < 2:
            yield Violation(key, stages, "must be 2 or more, or null")
        if self.pipeline_model_parallel_size < 2:
            yield Violation(key, stages, "needs pipeline_model_parallel_size of 2 or more: write null")
        if self.override_transformer_config.get("batch_p2p_comm", False):
            yield Violation(
                "override_transformer_config.batch_p2p_comm", True,
                "must be false with virtual stages: Megatron-Core exchanges the wrong activations, silently",
            )  # fmt: skip
        if self.override_transformer_config.get("overlap_p2p_comm") is False:
            expected = "must be true with virtual stages, whose exchange is not tested otherwise: leave it out"
            yield Violation("override_transformer_config.overlap_p2p_comm", False, expected)

    def _gather_in_forward(self) -> Iterator[Violation]:
        key, options = "override_ddp_config.overlap_param_gather", self.override_ddp_config
        if not options.get("overlap_param_gather"):
            return
        if not self.use_distributed_optimizer:
            expected = "needs megatron.use_distributed_optimizer=true: without it no step leaves weights to gather"
            yield Violation(key, True, expected)
        if not options.get("overlap_grad_reduce"):
            yield Violation(key, True, "needs overlap_grad_reduce=true beside it, which cuts the weights into buckets")

    def _unsupported(self) -> Iterator[Violation]:
        if self.override_mcore_model_config:
            expected = (
                "would change the model that trains and not the one that generates: write what config.json has in "
            )
            yield Violation(
                "override_mcore_model_config", self.override_mcore_model_config, f"{expected}model.override_config"
            )
        if self.use_mbridge:
            expected = "is not supported: write false, the tables of verl.models.mcore convert the weights"
            yield Violation.unsupported("use_mbridge", True, expected)
        yield from self._gather_in_forward()
        own = self.override_ddp_config.get("use_distributed_optimizer", self.use_distributed_optimizer)
        if own != self.use_distributed_optimizer:
            expected = "stands one level higher: write megatron.use_distributed_optimizer"
            yield Violation("override_ddp_config.use_distributed_optimizer", own, expected)
        modules = self.override_transformer_config.get("recompute_modules") or ()
        if unknown := [name for name in modules if name not in RECOMPUTED]:
            expected = f"names {', '.join(map(str, unknown))}: it may name {', '.join(RECOMPUTED)}"
            yield Violation("override_transformer_config.recompute_modules", modules, expected)
        for key, values in OVERRIDE_VALUES.items():
            value = self.override_transformer_config.get(key)
            if value is not None and value not in values:
                expected = f"must be null or one of {', '.join(values)}"
                yield Violation(f"override_transformer_config.{key}", value, expected)
