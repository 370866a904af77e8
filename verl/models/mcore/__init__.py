"""Hugging Face models on Megatron-Core: families, weights in both directions, and the model itself."""

from typing import Any

import verl.models.mcore.deepseek  # noqa: F401  enters itself
from verl.models.mcore.converter import get_mcore_weight_converter
from verl.models.mcore.families import Family, UnsupportedModelError, register_family, supported_architectures

_NEED_MEGATRON = ("hf_to_mcore_config", "init_mcore_model")

__all__ = [
    "Family",
    "UnsupportedModelError",
    "get_mcore_weight_converter",
    "hf_to_mcore_config",
    "init_mcore_model",
    "register_family",
    "supported_architectures",
]


def __getattr__(name: str) -> Any:
    """Import Megatron-Core only for those who ask for what needs it."""
    if name not in _NEED_MEGATRON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from verl.models.mcore.gpt import build

    return getattr(build, name)
