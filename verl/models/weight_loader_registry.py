"""Load a whole model's weights into this rank's chunks and save them, by the architecture of its config.json."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from verl.errors import UnsupportedInput
from verl.models.mcore.families import HEAD_NAMES, language_prefix, supported_architectures, text_of
from verl.models.mcore.weights import is_stack
from verl.models.mcore_limits import causal_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig


def get_weight_loader(arch: str) -> Callable[..., None]:
    """Return ``load_weights``. Raises: UnsupportedInput for an unknown architecture."""
    _known(arch)
    return load_weights


def get_weight_saver(arch: str) -> Callable[..., dict[str, Tensor]]:
    """Return ``save_weights``. Raises: UnsupportedInput for an unknown architecture."""
    _known(arch)
    return save_weights


def _known(arch: str) -> None:
    known = supported_architectures()
    if causal_name(arch) not in known:
        raise UnsupportedInput(f"architecture {arch} is not supported; supported are {', '.join(known)}")


def load_weights(
    state_dict: Mapping[str, Tensor],
    wrapped_models: nn.Module | Sequence[nn.Module],
    config: "PretrainedConfig",
    params_dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> None:
    """Fill this rank's chunks from a state dict under checkpoint names, which every rank holds.

    A missing value head is initialised. ``tie_word_embeddings`` is ignored: the chunks know it.

    Raises: ValueError naming a tensor that is missing or has the wrong shape.
    """
    from verl.models.mcore.gpt.build import load_parts
    from verl.utils.megatron_utils import unwrap_model

    def read(name: str, shape: Sequence[int], part: tuple[slice, ...]) -> Tensor:
        if name == "lm_head.weight" and name not in state_dict:  # tied
            name = f"{language_prefix(config)}embed_tokens.weight"
        if name not in state_dict:
            if name in HEAD_NAMES:
                std = 0.0 if name.endswith("bias") else text_of(config).initializer_range
                return torch.randn(*shape, generator=torch.Generator().manual_seed(0)) * std
            raise ValueError(f"the state dict lacks {name!r}")
        tensor = state_dict[name]
        if tuple(tensor.shape) != tuple(shape):
            raise ValueError(f"tensor {name!r} has shape {tuple(tensor.shape)}, but the model needs {tuple(shape)}")
        return tensor[part].to(params_dtype)

    models = wrapped_models if isinstance(wrapped_models, list | tuple) else [wrapped_models]
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items() if is_stack(name)}
    load_parts(unwrap_model(list(models)), config, is_value_model, read, shapes)


def save_weights(
    wrapped_models: nn.Module | Sequence[nn.Module],
    config: "PretrainedConfig",
    dtype: torch.dtype,
    is_value_model: bool = False,
    tie_word_embeddings: bool = False,
) -> dict[str, Tensor]:
    """Return the whole model under checkpoint names in rank 0's host memory, and an empty dict elsewhere; collective.

    The arguments after ``dtype`` are ignored: the chunks know them.
    """
    import torch.distributed as dist

    from verl.models.mcore.gpt.export import module_weights

    models = [wrapped_models] if isinstance(wrapped_models, nn.Module) else wrapped_models
    keeps = not dist.is_initialized() or dist.get_rank() == 0
    whole = {}
    for name, tensor in module_weights(models, config):
        if keeps:
            whole[name] = tensor.to("cpu", dtype, copy=True)
    return whole
