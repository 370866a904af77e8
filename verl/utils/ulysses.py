"""Ulysses sequence parallelism: ranks hold slices of sequences, and whole sequences of some heads during attention.

Attention needs all positions of a sequence but treats heads independently. So an all-to-all before attention exchanges
slices of the sequence for slices of the heads, and another one after attention reverses that.

Source: DeepSpeed-Ulysses (arXiv:2309.14509).
"""

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.utils.numerics.autograd import Kept

_GROUP: ProcessGroup | None = None


def set_ulysses_sequence_parallel_group(group: ProcessGroup | None) -> ProcessGroup | None:
    """Set the group in which attention exchanges heads, and return the previous group."""
    global _GROUP
    previous = _GROUP
    _GROUP = group
    return previous


def get_ulysses_sequence_parallel_group() -> ProcessGroup | None:
    """Return the current group; None without sequence parallelism."""
    return _GROUP


def get_ulysses_sequence_parallel_world_size(group: ProcessGroup | None = None) -> int:
    """Return the number of ranks that share a sequence; 1 without a group."""
    group = group or _GROUP
    return dist.get_world_size(group) if group is not None else 1


def get_ulysses_sequence_parallel_rank(group: ProcessGroup | None = None) -> int:
    """Return the index of this rank's slice; 0 without a group."""
    group = group or _GROUP
    return dist.get_rank(group) if group is not None else 0


def validate_ulysses_config(num_heads: int, ulysses_sequence_size: int, num_key_value_heads: int | None = None) -> None:
    """Check that the ranks can share the heads equally.

    Raises: ValueError if they cannot.
    """
    if num_heads % ulysses_sequence_size:
        raise ValueError(
            f"ulysses_sequence_parallel_size={ulysses_sequence_size} must divide the {num_heads} attention heads"
        )
    kv = num_key_value_heads or num_heads
    if kv % ulysses_sequence_size and ulysses_sequence_size % kv:
        raise ValueError(
            f"ulysses_sequence_parallel_size={ulysses_sequence_size} must divide the {kv} key-value heads, or be a "
            "multiple of them"
        )


# ---- exchange


def _exchange(x: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup) -> Tensor:
    # An all-to-all sends entry i of the first dim to rank i. The chunks of the scattered dim become these entries, and
    # arrive in rank order, which is the order of the slices of the gathered dim.
    sent = torch.stack(x.chunk(dist.get_world_size(group), dim=scatter_dim)).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group)
    return torch.cat(received.unbind(0), dim=gather_dim)


class _KeptOfExchange(Kept, Protocol):
    dims: tuple[int, int]
    group: ProcessGroup


class _AllToAll(torch.autograd.Function):
    """An exchange of two dims; the backward pass is the opposite exchange."""

    @staticmethod
    def forward(ctx: _KeptOfExchange, x: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup) -> Tensor:
        ctx.dims = (scatter_dim, gather_dim)
        ctx.group = group
        return _exchange(x, scatter_dim, gather_dim, group)

    @staticmethod
    def backward(ctx: _KeptOfExchange, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scatter_dim, gather_dim = ctx.dims
        return _exchange(grads[0], gather_dim, scatter_dim, ctx.group), None, None, None


class _KeptOfGather(Kept, Protocol):
    rank: int
    dim: int
    length: int


class _AllGather(torch.autograd.Function):
    """Gather equal slices.

    All ranks compute the same loss from the gathered tensor, so the gradient is the same on all of them, and each
    keeps its slice without a reduction.
    """

    @staticmethod
    def forward(ctx: _KeptOfGather, x: Tensor, dim: int, group: ProcessGroup) -> Tensor:
        ctx.rank = dist.get_rank(group)
        ctx.dim = dim
        ctx.length = x.shape[dim]
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, dim=dim)

    @staticmethod
    def backward(ctx: _KeptOfGather, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0].narrow(ctx.dim, ctx.rank * ctx.length, ctx.length), None, None


def all_to_all_tensor(x: Tensor, scatter_dim: int, gather_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """Scatter one dim over the ranks and gather another from them; differentiable."""
    group = group or _GROUP
    if group is None or dist.get_world_size(group) == 1:
        return x
    return _AllToAll.apply(x, scatter_dim, gather_dim, group)  # type: ignore[no-untyped-call]


def all_gather_tensor(x: Tensor, dim: int = 0, group: ProcessGroup | None = None) -> Tensor:
    """Concatenate the equal slices of all ranks; differentiable if all ranks compute the same loss."""
    group = group or _GROUP
    if group is None or dist.get_world_size(group) == 1:
        return x
    return _AllGather.apply(x, dim, group)  # type: ignore[no-untyped-call]


def gather_seq_scatter_heads(
    x: Tensor, seq_dim: int, head_dim: int, unpadded_dim_size: int = 0, group: ProcessGroup | None = None
) -> Tensor:
    """Turn a slice of the sequence with all heads into the whole sequence with a share of the heads."""
    x = all_to_all_tensor(x, head_dim, seq_dim, group)
    # Padding stands at the end of the whole sequence, so it is in the last slices.
    return x.narrow(seq_dim, 0, unpadded_dim_size) if unpadded_dim_size else x


def gather_heads_scatter_seq(x: Tensor, head_dim: int, seq_dim: int, group: ProcessGroup | None = None) -> Tensor:
    """Undo ``gather_seq_scatter_heads``, after zero-padding the sequence to a multiple of the group size."""
    size = get_ulysses_sequence_parallel_world_size(group)
    return all_to_all_tensor(_pad_dim(x, seq_dim, -x.shape[seq_dim] % size), seq_dim, head_dim, group)


def slice_input_tensor(x: Tensor, dim: int, padding: bool = True, group: ProcessGroup | None = None) -> Tensor:
    """Return this rank's slice of a dim.

    Raises: ValueError if the group size does not divide it and ``padding`` is off.
    """
    size = get_ulysses_sequence_parallel_world_size(group)
    rank = get_ulysses_sequence_parallel_rank(group)
    rest = -x.shape[dim] % size
    if rest and not padding:
        raise ValueError(f"dim {dim} of size {x.shape[dim]} cannot be sliced over {size} ranks without padding")
    return _pad_dim(x, dim, rest).chunk(size, dim=dim)[rank]


def gather_outputs_and_unpad(
    x: Tensor,
    gather_dim: int,
    unpad_dim: int | None = None,
    padding_size: int = 0,
    grad_scaler: bool = True,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Gather the slices of all ranks and drop the padding at the end.

    ``grad_scaler`` is accepted and not used: every rank keeps the gradient of its slice, which needs no scale.
    """
    x = all_gather_tensor(x, gather_dim, group)
    if unpad_dim is None or padding_size == 0:
        return x
    return x.narrow(unpad_dim, 0, x.shape[unpad_dim] - padding_size)


gather_outpus_and_unpad = gather_outputs_and_unpad


# ---- inputs


def ulysses_pad(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1
) -> tuple[Tensor, Tensor | None, int]:
    """Pad packed ids (1, T) and positions (..., 1, T) to a multiple of ``sp_size``; return also the padding size.

    The positions of the padding start at 0, which makes it a separate sequence.
    """
    padding = -input_ids_rmpad.shape[-1] % sp_size
    if padding == 0:
        return input_ids_rmpad, position_ids_rmpad, 0
    input_ids_rmpad = F.pad(input_ids_rmpad, (0, padding))
    if position_ids_rmpad is not None:
        tail = torch.arange(padding, device=position_ids_rmpad.device).expand(*position_ids_rmpad.shape[:-1], padding)
        position_ids_rmpad = torch.cat([position_ids_rmpad, tail], dim=-1)
    return input_ids_rmpad, position_ids_rmpad, padding


def ulysses_pad_and_slice_inputs(
    input_ids_rmpad: Tensor, position_ids_rmpad: Tensor | None = None, sp_size: int = 1
) -> tuple[Tensor, Tensor | None, int]:
    """Pad like ``ulysses_pad``, and return this rank's slices."""
    ids, positions, padding = ulysses_pad(input_ids_rmpad, position_ids_rmpad, sp_size)
    ids = slice_input_tensor(ids, dim=-1, padding=False)
    if positions is not None:
        positions = slice_input_tensor(positions, dim=-1, padding=False)
    return ids, positions, padding


def _pad_dim(x: Tensor, dim: int, padding: int) -> Tensor:
    if padding == 0:
        return x
    shape = list(x.shape)
    shape[dim] = padding
    return torch.cat([x, x.new_zeros(shape)], dim=dim)
