"""Weights of a whole model into the chunks of this rank and out of them, by the architecture of its config.json."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.models.mcore.families import HEAD_NAMES, UnsupportedModelError, causal_name, supported_architectures

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def get_weight_loader(arch: str) -> Callable[..., None]:
    """Return ``load_weights`` for an architecture that it knows. Raises: UnsupportedModelError for others."""
    _known(arch)
    return load_weights


def get_weight_saver(arch: str) -> Callable[..., dict[str, Tensor]]:
    """Return ``save_weights`` for an architecture that it knows. Raises: UnsupportedModelError for others."""
    _known(arch)
    return save_weights


def _known(arch: str) -> None:
    known = supported_architectures()
    if causal_name(arch) not in known:
        raise UnsupportedModelError(f"architecture {arch} is not known: there are {', '.join(known)}")


def load_weights(
    state_dict: Mapping[str, Tensor],
    wrapped_models: Any,
    config: "PretrainedConfig",
    params_dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> None:
    """Fill the chunks of this rank with its parts of a state dict under checkpoint names, which every rank has.

    A value model without a head there gets a new one. ``tie_word_embeddings`` is not read: the chunks know it.

    Raises: ValueError naming a tensor that is missing or of another shape.
    """
    from verl.models.mcore.gpt.load import load_parts
    from verl.utils.megatron_utils import unwrap_model

    def read(name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        if name == "lm_head.weight" and name not in state_dict:  # it is tied
            name = "model.embed_tokens.weight"
        if name not in state_dict:
            if name in HEAD_NAMES:
                std = 0.0 if name.endswith("bias") else config.initializer_range
                return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * std
            raise ValueError(f"the state dict lacks {name!r}")
        tensor = state_dict[name]
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(shape)}")
        return tensor[part].to(params_dtype)

    models = wrapped_models if isinstance(wrapped_models, list | tuple) else [wrapped_models]
    load_parts(unwrap_model(list(models)), config, is_value_model, read)


def save_weights(
    wrapped_models: Any,
    config: "PretrainedConfig",
    dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> dict[str, Tensor]:
    """Return the whole model under checkpoint names on the host of rank 0, and nothing on others; collective.

    The arguments behind ``dtype`` are not read: the chunks know them.
    """
    import torch.distributed as dist

    from verl.utils.megatron_utils import per_tensor_generator

    models = wrapped_models if isinstance(wrapped_models, list | tuple) else [wrapped_models]
    keeps = not dist.is_initialized() or dist.get_rank() == 0
    whole = {}
    for name, tensor in per_tensor_generator(list(models), config, None):
        if keeps:
            whole[name] = tensor.to("cpu", dtype, copy=True)
    return whole
