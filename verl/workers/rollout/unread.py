"""Engines that start without reading weights: the models whose servers do so, and the check of the first update."""

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from verl.workers.config.rollout import NEED_FILES

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

    from verl.workers.config import RolloutConfig

STREAMED = {
    "vllm": frozenset(
        (
            *("deepseek_v2", "deepseek_v3", "gemma", "gemma2", "glm4_moe", "glm4v", "kimi_vl", "llama", "mistral"),
            *("mixtral", "qwen2", "qwen2_moe", "qwen2_vl", "qwen2_5_vl", "qwen3", "qwen3_moe", "qwen3_vl"),
            "qwen3_vl_moe",
        )
    ),
    "sglang": frozenset(
        (
            *("gemma", "glm4_moe", "glm4v", "llama", "mistral", "mixtral", "qwen2", "qwen2_vl", "qwen2_5_vl"),
            *("qwen3", "qwen3_moe", "qwen3_vl", "qwen3_vl_moe"),
        )
    ),
}
"""Engine -> values of ``model_type`` whose stream of weights fills every tensor of the engine, as tests show."""


def stays_unread(config: "RolloutConfig", hf_config: "PreTrainedConfig") -> bool:
    """Whether the stream of a trainer is shown to fill an engine that has read no weights.

    The stream is the whole model: adapters come merged into the weights.
    """
    own = config.engine_kwargs.get(config.name) or {}
    needs_files = own.keys() & NEED_FILES or getattr(hf_config, "quantization_config", None) is not None
    return not needs_files and hf_config.model_type in STREAMED.get(config.name, ())


@torch.no_grad()
def fill_with_nan(model: nn.Module) -> None:
    """Fill parameters and saved buffers, as dummy weights do."""
    for _, tensor in _filled(model):
        tensor.fill_(torch.nan)


def check_nothing_is_nan(model: nn.Module) -> None:
    """Check that an update has written every tensor that ``fill_with_nan`` fills.

    Raises: RuntimeError naming a tensor that is still NaN.
    """
    missed = [name for name, tensor in _filled(model) if bool(tensor.amin().isnan())]
    if missed:
        raise RuntimeError(
            f"weight sync: the engine has read no weights, and {len(missed)} of its tensors are NaN after the first "
            f"update, such as {min(missed)}: the trainer sends NaN or does not send them. For the second case write "
            "actor_rollout_ref.rollout.load_format=auto, and the engine reads them from model.path"
        )


def _filled(model: nn.Module) -> list[tuple[str, Tensor]]:
    """Return the tensors of 16 bits and more; ``state_dict`` leaves out buffers that the model has computed."""
    saved = ((name, tensor) for name, tensor in model.state_dict().items() if tensor.numel())
    return [(name, tensor) for name, tensor in saved if tensor.is_floating_point() and tensor.itemsize > 1]
