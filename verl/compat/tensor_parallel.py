"""Helpers under the established names of ``verl.utils.megatron.tensor_parallel``, for models of users' forks."""

import sys

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_and_entropy


def vocab_parallel_log_probs_from_logits(logits: Tensor, labels: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the log-probability (...) of each label under logits (..., V / ranks)."""
    rows = logits.reshape(-1, logits.shape[-1])
    pair = vocab_parallel_log_probs_and_entropy(rows, labels.reshape(-1), group=_default(group), inplace_backward=False)
    return pair[0].view(labels.shape)


def vocab_parallel_entropy(logits: Tensor, group: ProcessGroup | None = None) -> Tensor:
    """Return the entropy (...) of logits (..., V / ranks); differentiable."""
    rows = logits.reshape(-1, logits.shape[-1])
    labels = rows.new_zeros(len(rows), dtype=torch.long)
    found = vocab_parallel_log_probs_and_entropy(
        rows, labels, entropy="grad", group=_default(group), inplace_backward=False
    )[1]
    assert found is not None
    return found.view(logits.shape[:-1])


def vocab_parallel_log_probs_from_logits_response_rmpad(
    input_ids: Tensor, attention_mask: Tensor, logits_rmpad: Tensor, response_length: int
) -> Tensor:
    """Return the log-probability (B, response_length) of each response token, zero at padding.

    ``logits_rmpad`` (T, V / ranks) holds the T tokens that ``attention_mask`` (B, L) keeps.
    """
    mask = attention_mask.bool()
    labels = input_ids.roll(-1, dims=1)[mask]  # the prediction of a row's last token is not used
    packed = vocab_parallel_log_probs_from_logits(logits_rmpad.reshape(len(labels), -1), labels)
    whole = packed.new_zeros(mask.shape).masked_scatter(mask, packed)
    return whole[:, -response_length - 1 : -1] * mask[:, -response_length:]


def is_tensor_parallel_param(param: Tensor) -> bool:
    """Whether ranks hold different parts of a parameter."""
    return bool(getattr(param, "tensor_model_parallel", False))


def get_tensor_parallel_partition_dim(param: Tensor) -> int:
    """Return the sharded dim of a parameter."""
    dim: int = param.partition_dim  # type: ignore[attr-defined]
    return dim


def _default(group: ProcessGroup | None) -> ProcessGroup | None:
    """Return the given group, else Megatron-Core's tensor-parallel group if there is one."""
    state = sys.modules.get("megatron.core.parallel_state")
    if group is not None or state is None or not state.model_parallel_is_initialized():
        return group
    return state.get_tensor_model_parallel_group()
