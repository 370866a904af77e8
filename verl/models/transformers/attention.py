"""Attention over packed sequences, registered with transformers as ``verl_varlen``.

A packed row holds several sequences end to end. Where flash-attn or torch's varlen kernel serve the device and dtype
they get the boundaries; elsewhere neighbouring sequences of about the same length share one batched SDPA call, without
any mask: the padding stands behind the causal horizon of the real tokens.

Works with transformers 5.16 to 5.19 (AttentionInterface and AttentionMaskInterface).
"""

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.utils.ulysses import (
    gather_heads_scatter_seq,
    gather_seq_scatter_heads,
    get_ulysses_sequence_parallel_world_size,
)

VARLEN_ATTENTION = "verl_varlen"
_MAX_PADDING = 1.25
"""A bucket of unequal sequences may hold this many times its real tokens."""


@dataclass(frozen=True)
class Bucket:
    """Neighbouring sequences ``start:stop`` of a packed row, padded to (count, length); no index when none is short."""

    start: int
    stop: int
    count: int
    length: int
    index: Tensor | None = None


class PackedSequences:
    """The boundaries of the sequences of a packed row, in every form that a kernel asks for."""

    def __init__(self, lengths: list[int], device: torch.device | str) -> None:
        self.lengths = lengths
        self.total = sum(lengths)
        self.max_length = max(lengths)
        self.device = device
        self._cu_seqlens: Tensor | None = None
        self._buckets: list[Bucket] | None = None

    @property
    def cu_seqlens(self) -> Tensor:
        """(n + 1,) int32 offsets on the device."""
        if self._cu_seqlens is None:
            offsets = F.pad(torch.tensor(self.lengths).cumsum(0), (1, 0))
            self._cu_seqlens = offsets.to(self.device, torch.int32, non_blocking=True)
        return self._cu_seqlens

    @property
    def buckets(self) -> list[Bucket]:
        """The sequences grouped for batched calls; made once, used by every layer."""
        if self._buckets is None:
            self._buckets = _make_buckets(self.lengths, self.device)
        return self._buckets


def _make_buckets(lengths: list[int], device: torch.device | str) -> list[Bucket]:
    groups: list[list[int]] = []
    for length in lengths:
        joined = [*groups[-1], length] if groups else [length]
        if groups and max(joined) * len(joined) <= _MAX_PADDING * sum(joined):
            groups[-1].append(length)
        else:
            groups.append([length])
    buckets, start = [], 0
    for group in groups:
        stop, longest = start + sum(group), max(group)
        index = None
        if min(group) < longest:
            columns = torch.arange(longest)
            index = (columns < torch.tensor(group).unsqueeze(1)).flatten().nonzero().squeeze(1).to(device)
        buckets.append(Bucket(start, stop, len(group), longest, index))
        start = stop
    return buckets


class _PadRows(torch.autograd.Function):
    """Put row i of (t, ...) at ``index[i]`` of (n, ...); the rest is zero."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor, size: int) -> Tensor:
        ctx.save_for_backward(index)
        return rows.new_zeros(size, *rows.shape[1:]).index_copy_(0, index, rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grads[0].index_select(0, index), None, None


class _UnpadRows(torch.autograd.Function):
    """Take the rows at ``index``, which holds none twice."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        ctx.size = rows.shape[0]
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (index,) = ctx.saved_tensors
        return grads[0].new_zeros(ctx.size, *grads[0].shape[1:]).index_copy_(0, index, grads[0]), None


def _bucketed_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    outputs = []
    for bucket in packed.buckets:
        q, k, v = (_as_batch(t, bucket) for t in (query, key, value))
        banded = window is not None and bucket.length > window
        mask = _band(bucket.length, window, query.device) if banded else None
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=scale, dropout_p=dropout,
            enable_gqa=q.shape[1] != k.shape[1],
        )  # fmt: skip
        rows = out.transpose(1, 2).reshape(bucket.count * bucket.length, *query.shape[1:2], value.shape[2])
        if bucket.index is not None:
            rows = _UnpadRows.apply(rows, bucket.index)  # type: ignore[no-untyped-call]
        outputs.append(rows)
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _as_batch(rows: Tensor, bucket: Bucket) -> Tensor:
    """Cut a bucket out of (T, H, D) as (count, H, length, D)."""
    rows = rows[bucket.start : bucket.stop]
    if bucket.index is not None:
        rows = _PadRows.apply(rows, bucket.index, bucket.count * bucket.length)  # type: ignore[no-untyped-call]
    return rows.view(bucket.count, bucket.length, *rows.shape[1:]).transpose(1, 2)


def _band(length: int, window: int | None, device: torch.device) -> Tensor:
    at = torch.arange(length, device=device)
    distance = at.unsqueeze(1) - at.unsqueeze(0)
    return (distance >= 0) & (distance < (window or length))


@cache
def _flash_attn_varlen() -> Any:
    try:
        from flash_attn import flash_attn_varlen_func
    except ImportError:
        return None
    return flash_attn_varlen_func


def _cuda_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    packed: PackedSequences,
    scale: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    bounds, longest = packed.cu_seqlens, packed.max_length
    left = (window or 0) - 1
    if (flash := _flash_attn_varlen()) is not None:
        out: Tensor = flash(
            query, key, value, bounds, bounds, longest, longest,
            dropout_p=dropout, softmax_scale=scale, causal=True, window_size=(left, -1 if left < 0 else 0),
        )  # fmt: skip
        return out
    from torch.nn.attention.varlen import varlen_attn

    heads = query.shape[1] != key.shape[1]
    result = varlen_attn(
        query, key, value, bounds, bounds, longest, longest, scale=scale, window_size=(left, 0), enable_gqa=heads
    )
    assert isinstance(result, Tensor)
    return result


def _packed_kernel(query: Tensor, dropout: float) -> Any:
    """Choose by device and dtype; torch's kernel has no dropout."""
    served = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16) and query.shape[-1] <= 256
    if served and (_flash_attn_varlen() is not None or dropout == 0):
        return _cuda_varlen
    return _bucketed_sdpa


def packed_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None = None, dropout: float = 0.0
) -> Tensor:
    """Attend causally within each sequence of a packed row: query (T, H, D), key and value (T, K, D) -> (T, H, D)."""
    out: Tensor = _packed_kernel(query, dropout)(query, key, value, packed, scale, dropout, None)
    return out


def varlen_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    sliding_window: int | None = None,
    packed_sequences: PackedSequences | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend within each sequence of a packed row.

    Args: query (1, H, T, D), key and value (1, K, T, D); with Ulysses T is this rank's slice.
    Returns: (1, T, H, D). Without ``packed_sequences`` this is transformers' own ``sdpa``.
    Raises: ValueError for logit caps and sinks, which the kernels do not know.
    """
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    if packed_sequences is None or not causal:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward

        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, is_causal=is_causal, **kwargs
        )
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(
                f"packed attention does not support {name!r} of {type(module).__name__}: "
                "set model.use_remove_padding=False"
            )
    q, k, v = (t.transpose(1, 2).squeeze(0) for t in (query, key, value))
    sp_size = get_ulysses_sequence_parallel_world_size()
    if sp_size > 1:
        if k.shape[1] < sp_size:
            k, v = (t.repeat_interleave(sp_size // t.shape[1], dim=1) for t in (k, v))
        q, k, v = (gather_seq_scatter_heads(t, seq_dim=0, head_dim=1) for t in (q, k, v))
    out = _packed_kernel(q, dropout)(q, k, v, packed_sequences, scaling, dropout, sliding_window)
    if sp_size > 1:
        out = gather_heads_scatter_seq(out, head_dim=1, seq_dim=0)
    return out.unsqueeze(0), None


def _varlen_mask(attention_mask: Tensor | None = None, **kwargs: Any) -> Tensor | None:
    """Build no mask for packed rows, which come without one, and that of sdpa for padded ones."""
    if attention_mask is None:
        return None
    from transformers.masking_utils import sdpa_mask

    mask: Tensor | None = sdpa_mask(attention_mask=attention_mask, **kwargs)
    return mask


@cache
def register_varlen_attention() -> None:
    """Make ``attn_implementation="verl_varlen"`` known to transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    AttentionInterface.register(VARLEN_ATTENTION, varlen_attention_forward)
    AttentionMaskInterface.register(VARLEN_ATTENTION, _varlen_mask)
