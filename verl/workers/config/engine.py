"""Sharding, offload and precision of a training engine."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig, Violation

STRATEGIES = ("fsdp", "fsdp2")
DTYPES = ("fp32", "float32", "bf16", "bfloat16", "fp16", "float16")
WRAP_KEYS = ("min_num_params", "disable", "transformer_layer_cls_to_wrap")
PRECISION_KEYS = ("param_dtype", "reduce_dtype", "buffer_dtype")


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
        for key, dtype in (self.mixed_precision or {}).items():
            if key not in PRECISION_KEYS:
                expected = f"unknown key: write one of {', '.join(PRECISION_KEYS)}"
                yield Violation(f"mixed_precision.{key}", dtype, expected)
            elif dtype not in DTYPES:
                yield Violation(f"mixed_precision.{key}", dtype, f"must be one of {', '.join(DTYPES)}")
