"""Helpers under the established names of ``verl.utils.megatron``, for pipelines and sequence parallelism."""

from collections.abc import Iterator, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from verl.utils.seqlen_balancing import roundup_divisible

Batch = TypeVar("Batch")


def make_batch_generator(batches: Sequence[Batch], vpp_size: int) -> Iterator[Batch] | list[Iterator[Batch]]:
    """Return an iterator over micro-batches; with virtual stages, a list with one iterator per stage."""
    return [iter(batches) for _ in range(vpp_size)] if vpp_size > 1 else iter(batches)


def compute_transformers_input_shapes(
    batches: Sequence[Mapping[str, Tensor]], meta_info: Mapping[str, int]
) -> list[torch.Size]:
    """Return the shape (t, 1, h) of each micro-batch's hidden states without padding.

    Each has ``attention_mask`` (B, L). ``meta_info`` holds ``hidden_size`` and ``sequence_parallel``; the latter pads
    the tokens to a multiple of the tensor-parallel size and divides them by it.
    """
    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from megatron.core import parallel_state

    shapes = []
    for batch in batches:
        tokens = int(batch["attention_mask"].sum())
        if meta_info["sequence_parallel"]:
            size = parallel_state.get_tensor_model_parallel_world_size()
            tokens = roundup_divisible(tokens, size) // size
        shapes.append(torch.Size([tokens, 1, meta_info["hidden_size"]]))
    return shapes


def mark_parameter_as_sequence_parallel(parameter: Tensor) -> None:
    """Mark a parameter so that its gradient is summed over the ranks that share the tokens."""
    parameter.sequence_parallel = True  # type: ignore[attr-defined]


def is_sequence_parallel_param(param: Tensor) -> bool:
    """Whether a parameter has that mark."""
    return bool(getattr(param, "sequence_parallel", False))


def pad_to_sequence_parallel(unpad_tokens: Tensor) -> Tensor:
    """Pad (T, ...) tokens with zeros to a multiple of the tensor-parallel size."""
    from verl.utils.megatron import cpu_support

    cpu_support.install()
    from megatron.core import parallel_state

    size = parallel_state.get_tensor_model_parallel_world_size()
    padding = unpad_tokens.new_zeros(-len(unpad_tokens) % size, *unpad_tokens.shape[1:])
    return torch.cat([unpad_tokens, padding])
