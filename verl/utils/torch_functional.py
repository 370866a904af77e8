"""Small tensor functions: masked statistics, log-probabilities, padding, reductions over ranks."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from verl.errors import SequenceTooLongError
from verl.utils.device import get_device_name, get_torch_device
from verl.utils.numerics.entropy import entropy
from verl.utils.numerics.log_probs import log_probs_and_entropy
from verl.utils.numerics.lr_schedules import get_constant_schedule_with_warmup as get_constant_schedule_with_warmup
from verl.utils.numerics.lr_schedules import get_cosine_schedule_with_warmup as get_cosine_schedule_with_warmup
from verl.utils.numerics.lr_schedules import get_wsd_schedule_with_warmup as get_wsd_schedule_with_warmup

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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


def logprobs_from_logits(logits: Tensor, labels: Tensor, inplace_backward: bool = True) -> Tensor:
    """Return the log-probability of each label: (...) from logits (..., V).

    With ``inplace_backward`` the gradient overwrites the logits.
    """
    return log_probs_and_entropy(logits, labels, inplace_backward=inplace_backward)[0]


def logprobs_from_logits_naive(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same by a plain log_softmax, the reference of the other forms."""
    return F.log_softmax(logits, dim=-1).gather(-1, labels.unsqueeze(-1)).squeeze(-1)


def logprobs_from_logits_v2(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the same; the backward pass leaves the logits unchanged."""
    return logprobs_from_logits(logits, labels, inplace_backward=False)


# Established names of backend variants; there is one implementation for all devices.
logprobs_from_logits_flash_attn = logprobs_from_logits
logprobs_from_logits_torch_npu = logprobs_from_logits_v2


def entropy_from_logits(logits: Tensor) -> Tensor:
    """Return the entropy of each distribution: (...) from logits (..., V), in fp32 or better."""
    return entropy(logits)


def entropy_from_logits_with_chunking(logits: Tensor, chunk_size: int = 2048, checkpointing: bool = False) -> Tensor:
    """Return the entropy of (..., V) logits, at most ``chunk_size`` rows at a time.

    The backward pass always recomputes the probabilities of a chunk, so ``checkpointing`` changes nothing.
    """
    return entropy(logits, chunk_size)


def log_probs_from_logits_response(input_ids: Tensor, logits: Tensor, response_length: int) -> Tensor:
    """Return the log-probabilities of the last ``response_length`` tokens: (B, R) from ids (B, L), logits (B, L, V)."""
    before = logits[:, -response_length - 1 : -1]
    return logprobs_from_logits(before, input_ids[:, -response_length:], inplace_backward=False)


def log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """Return the same from the logits (N, V) of the attended tokens."""
    indices = attention_mask.flatten().nonzero().squeeze(-1)
    packed = input_ids.flatten()[indices]
    batch_size, length = input_ids.shape
    return log_probs_from_logits_all_rmpad(packed, logits_rmpad, indices, batch_size, length, response_length)


def log_probs_from_logits_all_rmpad(
    input_ids_rmpad: Tensor, logits_rmpad: Tensor, indices: Tensor, batch_size: int, seqlen: int, response_length: int
) -> Tensor:
    """Return the same from packed ids (N,) or (1, N) and their flat positions (N,)."""
    labels = torch.roll(input_ids_rmpad.reshape(-1), shifts=-1)
    packed = logprobs_from_logits(logits_rmpad.reshape(len(labels), -1), labels)
    padded = packed.new_zeros(batch_size * seqlen).index_put((indices,), packed)
    return padded.view(batch_size, seqlen)[:, -response_length - 1 : -1]


def post_process_logits(
    input_ids: Tensor | None, logits: Tensor, temperature: float, top_k: int, top_p: float
) -> Tensor:
    """Apply temperature, top-k and top-p to (..., V) logits; dropped tokens become minus infinity.

    ``top_k <= 0`` and ``top_p >= 1`` drop nothing.
    """
    if temperature != 1.0:
        logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k, dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    if top_p < 1.0:
        ranked, order = logits.sort(dim=-1, descending=True)
        before = ranked.softmax(dim=-1).cumsum(dim=-1) - ranked.softmax(dim=-1)
        cut = torch.zeros_like(before, dtype=torch.bool).scatter(-1, order, before >= top_p)
        logits = logits.masked_fill(cut, -torch.inf)
    return logits


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


def get_response_mask(response_id: Tensor, eos_token: int | list[int] = 2, dtype: torch.dtype = torch.int64) -> Tensor:
    """Mark the tokens of (B, R) responses through their first EOS: 1 there, 0 after."""
    eos = torch.as_tensor([eos_token] if isinstance(eos_token, int) else eos_token, device=response_id.device)
    is_eos = torch.isin(response_id, eos).long()
    return (is_eos.cumsum(dim=-1) - is_eos == 0).to(dtype)


def pad_2d_list_to_length(
    response: Sequence[Sequence[float]], pad_token_id: float, max_length: int | None = None
) -> Tensor:
    """Right-pad ragged rows to the longest row or to ``max_length``, whichever is more: (B, max)."""
    width = max([max_length or 0, *map(len, response)])
    return torch.tensor([[*row, *[pad_token_id] * (width - len(row))] for row in response])


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


def tokenize_and_postprocess_data(
    prompt: str,
    tokenizer: "PreTrainedTokenizerBase",
    max_length: int,
    pad_token_id: int,
    left_pad: bool = True,
    truncation: str = "error",
) -> tuple[Tensor, Tensor]:
    """Tokenize a prompt without special tokens and fit it to ``max_length``: ids and mask, each (1, max_length)."""
    row = tokenizer(prompt, return_tensors="pt", add_special_tokens=False)
    return postprocess_data(row["input_ids"], row["attention_mask"], max_length, pad_token_id, left_pad, truncation)


def remove_pad_token(input_ids: Tensor, attention_mask: Tensor) -> list[list[int]]:
    """Return the attended tokens of each row of (B, L) ids."""
    return [row[kept].tolist() for row, kept in zip(input_ids, attention_mask.bool(), strict=True)]


# ---- dicts of tensors, gradients and ranks


def split_dict_tensor_into_batches(tensors: TensorDict, batch_size: int) -> list[TensorDict]:
    """Split a TensorDict into parts of ``batch_size`` rows.

    Raises: ValueError when the rows do not divide evenly.
    """
    if tensors.batch_size[0] % batch_size:
        raise ValueError(f"{tensors.batch_size[0]} rows do not divide into batches of {batch_size}")
    return list(tensors.split(batch_size))


def broadcast_dict_tensor(tensors: dict[str, Tensor] | TensorDict, src: int, group: dist.ProcessGroup | None) -> None:
    """Overwrite the tensors of every rank with those of ``src``, in place and in the order of sorted keys."""
    for key in sorted(map(str, tensors.keys())):
        dist.broadcast(tensors[key], src=src, group=group)


def allgather_dict_tensors(tensors: Tensors, size: int, group: dist.ProcessGroup | None, dim: int = 0) -> Tensors:
    """Concatenate the tensors of all ``size`` ranks along ``dim``; returns the type of the input."""
    gathered: dict[str, Tensor] = {}
    for key in sorted(map(str, tensors.keys())):
        value = tensors[key].contiguous()
        parts = [torch.empty_like(value) for _ in range(size)]
        dist.all_gather(parts, value, group=group)
        gathered[key] = torch.cat(parts, dim=dim)
    if isinstance(tensors, TensorDict):
        return type(tensors)(gathered, batch_size=tensors.batch_size[0] * size)
    return gathered


def compute_grad_norm(model: nn.Module) -> float:
    """Return the Euclidean norm of this rank's gradients."""
    squares = [p.grad.detach().float().square().sum() for p in model.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt()) if squares else 0.0


def check_device_is_available() -> None:
    """Check that there is an accelerator.

    Raises: RuntimeError without one.
    """
    if get_device_name() == "cpu" or not get_torch_device().is_available():
        raise RuntimeError("no accelerator is available: CUDA or NPU is required")


def distributed_mean_max_min_std(
    local_tensor: Tensor, compute_max: bool = True, compute_min: bool = True, compute_std: bool = True
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Return mean, maximum, minimum and unbiased deviation over the tensors of all ranks."""
    total = torch.stack([local_tensor.sum(), local_tensor.new_tensor(local_tensor.numel())])
    dist.all_reduce(total)
    mean = total[0] / total[1]
    largest = smallest = std = None
    if compute_max:
        largest = local_tensor.max()
        dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    if compute_min:
        smallest = local_tensor.min()
        dist.all_reduce(smallest, op=dist.ReduceOp.MIN)
    if compute_std:
        squares = (local_tensor - mean).square().sum()
        dist.all_reduce(squares)
        std = (squares / (total[1] - 1)).sqrt()
    return mean, largest, smallest, std


def distributed_masked_mean(local_tensor: Tensor, local_mask: Tensor) -> Tensor:
    """Return the mean of the values under the masks of all ranks."""
    kept = torch.where(local_mask.bool(), local_tensor, 0.0).sum()
    total = torch.stack([kept, local_mask.sum().to(kept.dtype)])
    dist.all_reduce(total)
    return total[0] / total[1]
