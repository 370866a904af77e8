"""Attention over a forest: a token sees its own node up to itself, and all nodes above it.

On a CPU every node attends to itself, causally, in the batched calls of packed attention, and then, for each node that
others stand below, all tokens below attend to it in one call. Each call returns the logarithm of the sum of its
exponentials, by which the outputs are merged. Nothing is computed or kept twice, and no mask is needed. The backward
pass calls the kernel's own with the merged output and sum, which gives each call its part of the exact gradient, as in
ring attention (arXiv:2310.01889).

On a GPU ``flex_attention`` skips the blocks of the mask that are empty. It has not run there yet.

In plain form, with ``visible_until`` (T,)::

    at = torch.arange(T)
    sees = (at[None] <= at[:, None]) & (at[:, None] < visible_until[None])  # (query, key)
    out = F.scaled_dot_product_attention(query, key, value, sees)
"""

import math
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.transformers.packed_sequences import PackedSequences, PaddedGroup


def forest_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None = None
) -> Tensor:
    """Attend within each path of a forest: query (T, H, D), key (T, K, D) and value (T, K, E) -> (T, H, E)."""
    width = value.shape[-1]
    if width < query.shape[-1]:  # the kernels take heads of one size
        value = F.pad(value, (0, query.shape[-1] - width))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out = (_with_blocks if query.is_cuda else _with_merges)(query, key, value, packed, scale)
    return out[..., :width]


# ---- merged calls


def _with_merges(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float) -> Tensor:
    out: Tensor = _Merged.apply(query, key, value, packed, scale)  # type: ignore[no-untyped-call]
    return out


_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class _Merged(torch.autograd.Function):
    """Attention by calls of the kernel for parts of the keys; keeps query, key, value, output and sums."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float) -> Tensor:
        tokens, heads, _ = query.shape
        exact = torch.promote_types(query.dtype, torch.float32)
        out = query.new_empty(query.shape, dtype=exact)
        sums = query.new_empty(tokens, heads, dtype=exact)  # logarithms
        for group in packed.padded_groups:
            parts = (_batched(each, group) for each in (query, key, value))
            found, log_sum = _forward(*parts, 0.0, True, scale=scale)
            out[group.start : group.stop] = _rows(found, group)
            sums[group.start : group.stop] = _rows(log_sum.unsqueeze(-1), group).squeeze(-1)
        for start, stop, end in packed.prefixes:
            parts = (_alone(query[stop:end]), _alone(key[start:stop]), _alone(value[start:stop]))
            found, log_sum = _forward(*parts, 0.0, False, scale=scale)
            _merge(out[stop:end], sums[stop:end], found[0].transpose(0, 1), log_sum[0].transpose(0, 1))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.packed, ctx.scale = packed, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        packed: PackedSequences = ctx.packed
        grad = grads[0].contiguous()
        grads_in = [torch.empty_like(each) for each in (query, key, value)]
        for group in packed.padded_groups:
            parts = [_batched(each, group) for each in (grad, query, key, value, out)]
            log_sum = _batched(sums.unsqueeze(-1), group).squeeze(-1)
            for whole, part in zip(grads_in, _backward(*parts, log_sum, 0.0, True, scale=ctx.scale), strict=True):
                whole[group.start : group.stop] = _rows(part, group)
        for start, stop, end in packed.prefixes:
            below, above = slice(stop, end), slice(start, stop)
            parts = [_alone(grad[below]), _alone(query[below]), _alone(key[above]), _alone(value[above])]
            parts += [_alone(out[below]), sums[below].transpose(0, 1).unsqueeze(0)]
            found = _backward(*parts, 0.0, False, scale=ctx.scale)
            for whole, place, part in zip(grads_in, (below, above, above), found, strict=True):
                whole[place] += part[0].transpose(0, 1)
        return *grads_in, None, None


def _merge(out: Tensor, sums: Tensor, found: Tensor, log_sum: Tensor) -> None:
    """Add an output (t, H, E) over more keys, with the logarithm of its sum (t, H), in place."""
    total = torch.logaddexp(sums, log_sum)
    out.mul_((sums - total).exp_().unsqueeze(-1)).addcmul_(found, (log_sum - total).exp_().unsqueeze(-1))
    sums.copy_(total)


def _alone(rows: Tensor) -> Tensor:
    """Return rows (t, H, D) as one sequence, (1, H, t, D)."""
    return rows.transpose(0, 1).unsqueeze(0)


def _batched(rows: Tensor, group: PaddedGroup) -> Tensor:
    """Return the sequences of a group, (T, H, D) -> (count, H, length, D); padding is zero."""
    part = rows[group.start : group.stop]
    if group.index is not None:
        padded = part.new_zeros(group.count * group.length, *part.shape[1:])
        part = padded.index_copy_(0, group.index, part)
    return part.view(group.count, group.length, *part.shape[1:]).transpose(1, 2)


def _rows(batch: Tensor, group: PaddedGroup) -> Tensor:
    """Return the tokens of a group, (count, H, length, D) -> (t, H, D)."""
    rows = batch.transpose(1, 2).reshape(group.count * group.length, batch.shape[1], batch.shape[3])
    return rows if group.index is None else rows.index_select(0, group.index)


# ---- blocks of a mask


def _with_blocks(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    parts = (_alone(query), _alone(key), _alone(value))
    found: Tensor = _flex()(*parts, block_mask=packed.block_mask, scale=scale, enable_gqa=grouped)
    return found[0].transpose(0, 1)


@cache
def _flex() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
