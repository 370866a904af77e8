"""Batches and shapes of pipeline schedules that the caller drives."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def make_batch_generator(batches: Sequence[Any], vpp_size: int) -> Iterator[Any] | list[Iterator[Any]]:
    """Return an iterator over micro-batches: with virtual stages a list of one for each of them."""
    return [iter(batches) for _ in range(vpp_size)] if vpp_size > 1 else iter(batches)


def compute_transformers_input_shapes(batches: Sequence[Any], meta_info: dict[str, Any]) -> list[torch.Size]:
    """Return the shape (t, 1, h) of the hidden states of each micro-batch without its padding.

    Each has ``attention_mask`` (B, L). ``meta_info``: ``hidden_size`` and ``sequence_parallel``, with which tokens are
    padded to a multiple of the tensor-parallel ranks and shared by them.
    """
    from verl.utils.megatron import cpu_support
    from verl.utils.megatron.sequence_parallel import padded_to_multiple

    cpu_support.install()
    from megatron.core import parallel_state

    shapes = []
    for batch in batches:
        mask: Tensor = batch["attention_mask"]
        tokens = int(mask.sum())
        if meta_info["sequence_parallel"]:
            size = parallel_state.get_tensor_model_parallel_world_size()
            tokens = padded_to_multiple(tokens, size) // size
        shapes.append(torch.Size([tokens, 1, meta_info["hidden_size"]]))
    return shapes
