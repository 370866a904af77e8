"""Small tensor functions: masked statistics, log-probabilities, padding, reductions over ranks."""

from typing import TypeVar

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor

from verl.errors import SequenceTooLongError
from verl.utils.import_utils import lazy_exports
from verl.utils.numerics.entropy import entropy
from verl.utils.numerics.lr_schedules import get_constant_schedule_with_warmup as get_constant_schedule_with_warmup
from verl.utils.numerics.lr_schedules import get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup
from verl.utils.numerics.lr_schedules import get_wsd_schedule_with_warmup as get_wsd_schedule_with_warmup

_FOR_FORKS = (
    "logprobs_from_logits",
    "logprobs_from_logits_naive",
    "logprobs_from_logits_v2",
    "logprobs_from_logits_flash_attn",
    "logprobs_from_logits_torch_npu",
    "log_probs_from_logits_response",
    "log_probs_from_logits_response_rmpad",
    "log_probs_from_logits_all_rmpad",
    "post_process_logits",
    "get_response_mask",
    "pad_2d_list_to_length",
    "tokenize_and_postprocess_data",
    "split_dict_tensor_into_batches",
    "broadcast_dict_tensor",
    "allgather_dict_tensors",
    "compute_grad_norm",
    "check_device_is_available",
    "distributed_mean_max_min_std",
    "distributed_masked_mean",
)
"""Helpers that only forks call."""
__getattr__ = lazy_exports(__name__, dict.fromkeys(_FOR_FORKS, "verl.compat.torch_functional"))

_EPSILON = 1e-8
Axis = int | tuple[int, ...] | None
Tensors = TypeVar("Tensors", dict[str, Tensor], TensorDict)


# ---- masked statistics


def masked_sum(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Sum the values under the mask; NaN outside the mask is ignored."""
    return (torch.where(mask.bool(), values, 0.0) * mask).sum(dim=axis)


def masked_mean(values: Tensor, mask: Tensor, axis: Axis = None) -> Tensor:
    """Average the values under the mask; an empty mask gives zero."""
    return masked_sum(values, mask, axis) / (mask.sum(dim=axis) + _EPSILON)


def masked_var(values: Tensor, mask: Tensor, unbiased: bool = True) -> Tensor:
    """Return the variance of the values under the mask.

    Raises: ValueError for an empty mask, or for a single element if ``unbiased``.
    """
    count = mask.sum()
    needed = 2 if unbiased else 1
    if count < needed:
        raise ValueError(f"the variance needs at least {needed} elements under the mask, got {int(count)}")
    centered = values - masked_mean(values, mask)
    variance = masked_mean(centered.square(), mask)
    return variance * count / (count - 1) if unbiased else variance


def masked_whiten(values: Tensor, mask: Tensor, shift_mean: bool = True) -> Tensor:
    """Scale to unit variance under the mask, and to zero mean unless ``shift_mean`` is off.

    Raises: ValueError when the mask keeps fewer than two elements.
    """
    mean = masked_mean(values, mask)
    whitened = (values - mean) * torch.rsqrt(masked_var(values, mask) + _EPSILON)
    return whitened if shift_mean else whitened + mean


def clip_by_value(x: Tensor, tensor_min: Tensor, tensor_max: Tensor) -> Tensor:
    """Clamp between two broadcastable tensors."""
    return torch.maximum(torch.minimum(x, tensor_max), tensor_min)


# ---- log-probabilities and entropy


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy of each distribution: (...) from logits (..., V), in fp32 or better."""
    return entropy(logits)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048, checkpointing: bool = False) -> Tensor:
    """Return the entropy of (..., V) logits, at most ``chunk_size`` rows at a time.

    The backward pass always recomputes the probabilities of a chunk, so ``checkpointing`` changes nothing.
    """
    return entropy(logits, chunk_size)


# ---- responses and padding


def at_last_sampled(values: Tensor, mask: Tensor) -> Tensor:
    """Place (B,) values in (B, T), each at the last token of its row in the mask; in column 0 of a row without any."""
    last = (mask.bool() * torch.arange(1, mask.shape[1] + 1)).amax(-1).sub(1).clamp(min=0)
    return values.new_zeros(mask.shape).scatter(1, last.unsqueeze(1), values.unsqueeze(1))


def moved_to_sampled(values: Tensor, mask: Tensor) -> Tensor:
    """Move (B, T) values from tokens outside the mask to the last token of the mask before them, else to the first one.

    The sum of a row stays. A row without a token in the mask stays as it is.
    """
    sampled = mask.bool()
    if not (values.ne(0) & ~sampled).any():
        return values
    columns = torch.arange(mask.shape[1]).expand(mask.shape)
    before = torch.where(sampled, columns, -1).cummax(-1).values
    first = sampled.int().argmax(-1, keepdim=True)
    target = torch.where(before < 0, first, before)
    target = torch.where(sampled.any(-1, keepdim=True), target, columns)
    return torch.zeros_like(values).scatter_add(1, target, values)


def pad_sequence_to_length(tensors: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False) -> Tensor:
    """Pad the last dim to ``max_seq_len``; a longer tensor is returned unchanged."""
    missing = max_seq_len - tensors.shape[-1]
    if missing <= 0:
        return tensors
    return F.pad(tensors, (missing, 0) if left_pad else (0, missing), value=pad_token_id)


def postprocess_data(
    input_ids: Tensor,
    attention_mask: Tensor,
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Pad or truncate (B, L) ids and mask to ``max_length``.

    ``truncation``: ``left`` keeps the tail, ``right`` the head, ``middle`` half of each.

    Raises: SequenceTooLongError, a ValueError and a NotImplementedError, for ``error``; ValueError for another name.
    """
    if truncation not in ("left", "right", "middle", "error"):
        raise ValueError(f"data.truncation must be left, right, middle or error, got {truncation!r}")
    length = input_ids.shape[-1]
    if length <= max_length:
        ids = pad_sequence_to_length(input_ids, max_length, pad_token_id, left_pad)
        return ids, pad_sequence_to_length(attention_mask, max_length, 0, left_pad)
    if truncation == "error":
        raise SequenceTooLongError(
            f"a sequence of {length} tokens exceeds max_length={max_length}: raise data.max_prompt_length (or "
            "data.max_length), or set data.truncation to left, right or middle"
        )
    head = {"left": 0, "right": max_length, "middle": max_length // 2}[truncation]
    tail = length - (max_length - head)
    ids, mask = (torch.cat([x[..., :head], x[..., tail:]], dim=-1) for x in (input_ids, attention_mask))
    return ids, mask


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the attended tokens of each row of (B, L) ids."""
    return [row[kept].tolist() for row, kept in zip(input_ids, attention_mask.bool(), strict=True)]
