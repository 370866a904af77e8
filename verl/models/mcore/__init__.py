"""Hugging Face models on Megatron-Core: model families, weight conversion in both directions, and the model."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.models.mcore.families import Family as Family
from verl.models.mcore.families import find_family, text_of
from verl.models.mcore.families import get_mcore_weight_converter as get_mcore_weight_converter
from verl.models.mcore.families import register_family as register_family
from verl.models.mcore.families import supported_architectures as supported_architectures
from verl.utils.import_utils import lazy_exports

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig

    from verl.utils.model import CausalLMOutputForPPO

__getattr__ = lazy_exports(
    __name__, dict.fromkeys(("hf_to_mcore_config", "init_mcore_model"), "verl.models.mcore.gpt.build")
)


def get_mcore_forward_fn(hf_config: "PretrainedConfig") -> "Callable[..., Tensor | dict[str, Tensor]]":
    """Return the forward pass over padded rows, ``verl.models.mcore.gpt.forward.model_forward``.

    Raises: UnsupportedInput for an unknown architecture.
    """
    return _forward("model_forward", hf_config)


def get_mcore_forward_fused_fn(hf_config: "PretrainedConfig") -> "Callable[..., CausalLMOutputForPPO | Tensor]":
    """Return the forward pass to log-probabilities and entropies, ``fused_forward``. Raises: as above."""
    return _forward("fused_forward", hf_config)


def get_mcore_forward_no_padding_fn(hf_config: "PretrainedConfig") -> "Callable[..., Tensor | dict[str, Tensor]]":
    """Return the forward pass over jagged rows, ``model_forward_no_padding``. Raises: as above."""
    return _forward("model_forward_no_padding", hf_config)


def _forward(name: str, hf_config: "PretrainedConfig") -> Callable[..., Any]:
    find_family(hf_config)
    from verl.models.mcore.gpt import forward

    return partial(getattr(forward, name), vocab_size=text_of(hf_config).vocab_size)
