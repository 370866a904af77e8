"""Hugging Face models on Megatron-Core: model families, weight conversion in both directions, and the model."""

import importlib
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

import verl.models.mcore.deepseek  # noqa: F401  registers its family
from verl.models.mcore.converter import get_mcore_weight_converter as get_mcore_weight_converter
from verl.models.mcore.families import Family as Family
from verl.models.mcore.families import UnsupportedModelError as UnsupportedModelError
from verl.models.mcore.families import find_family
from verl.models.mcore.families import register_family as register_family
from verl.models.mcore.families import supported_architectures as supported_architectures
from verl.utils.megatron import cpu_support

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_NEED_MEGATRON = ("hf_to_mcore_config", "init_mcore_model")


def get_mcore_forward_fn(hf_config: "PretrainedConfig") -> Callable[..., Any]:
    """Return the forward pass over padded rows, ``verl.models.mcore.gpt.forward.model_forward``.

    Raises: UnsupportedModelError for an unknown architecture.
    """
    return _forward("model_forward", hf_config)


def get_mcore_forward_fused_fn(hf_config: "PretrainedConfig") -> Callable[..., Any]:
    """Return the forward pass to log-probabilities and entropies, ``fused_forward``. Raises: as above."""
    return _forward("fused_forward", hf_config)


def get_mcore_forward_no_padding_fn(hf_config: "PretrainedConfig") -> Callable[..., Any]:
    """Return the forward pass over jagged rows, ``model_forward_no_padding``. Raises: as above."""
    return _forward("model_forward_no_padding", hf_config)


def _forward(name: str, hf_config: "PretrainedConfig") -> Callable[..., Any]:
    find_family(hf_config)
    return partial(getattr(_with_megatron("forward"), name), vocab_size=hf_config.vocab_size)


def _with_megatron(module: str) -> ModuleType:
    """Import a module that needs Megatron-Core."""
    cpu_support.install()
    return importlib.import_module(f"verl.models.mcore.gpt.{module}")


def __getattr__(name: str) -> Any:
    """Import Megatron-Core when a name that needs it is first used."""
    if name not in _NEED_MEGATRON:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_with_megatron("build"), name)
