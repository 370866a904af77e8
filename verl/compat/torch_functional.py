"""Helpers under the established names of ``verl.utils.torch_functional``, for users' forks and recipes."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor, nn

from verl.utils.device import get_device_name, get_torch_device
from verl.utils.numerics.log_probs import log_probs_and_entropy
from verl.utils.torch_functional import Tensors, postprocess_data

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
