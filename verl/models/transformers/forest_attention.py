"""Attention over a forest: a token sees its own node up to itself, and all nodes above it.

Every node attends to itself, causally, and then all tokens below a node attend to it. Each call of a kernel returns
the logarithm of the sum of its exponentials, by which the outputs are merged. Nothing is computed or kept twice, and no
mask is needed. The backward pass calls the kernel's own with the merged output and sum, which gives each call its part
of the exact gradient, as in ring attention (arXiv:2310.01889).

On a CPU nodes of similar length attend to themselves in one batched call, and each node that others stand below takes a
call. On a GPU the calls are those of torch's flash attention with boundaries: one for all nodes, and one for each depth
at which others stand below; or one in all, for which keys and values are copied once for each node that sees them, so
that there is nothing to merge. Copies are the faster way unless prompts are long and key heads many. Where flash
attention does not take the device, dtype or head size, ``flex_attention`` skips the blocks of the mask that are empty.
Tests without a GPU hold the calls to the schemas, shapes and dtypes that torch registers for the kernels, and to the
dense mask, with a stand-in for their arithmetic.

In plain form, with ``visible_until`` (T,)::

    at = torch.arange(T)
    sees = (at[None] <= at[:, None]) & (at[:, None] < visible_until[None])  # (query, key)
    out = F.scaled_dot_product_attention(query, key, value, sees)
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.transformers.packed_sequences import Level, PackedSequences, PaddedGroup, Paths
from verl.utils.numerics.autograd import Kept


def forest_attention(
    query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None = None
) -> Tensor:
    """Attend within each path of a forest: query (T, H, D), key (T, K, D) and value (T, K, E) -> (T, H, E)."""
    width = value.shape[-1]
    if width < query.shape[-1]:  # the kernels need equal head dimensions of values and queries
        value = F.pad(value, (0, query.shape[-1] - width))
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    kernel = _kernel_for(query, key, packed)
    if kernel is None:
        return _with_blocks(query, key, value, packed, scale)[..., :width]
    out: Tensor = _Merged.apply(query, key, value, packed, scale, kernel)  # type: ignore[no-untyped-call]
    return out[..., :width]


def _kernel_for(query: Tensor, key: Tensor, packed: PackedSequences) -> "_Kernel | None":
    """Return the kernel with its calls; None where none takes the device, dtype or head size.

    Flash attention takes half precision, heads of a multiple of 8 up to 256, and GPUs of NVIDIA since Ampere. AMD's has
    other shapes of sums.
    """
    if query.device.type == "cpu":
        return _OnCpu()
    if not query.is_cuda or torch.version.hip or query.dtype not in (torch.float16, torch.bfloat16):
        return None
    width = query.shape[-1]
    recent = torch.cuda.get_device_capability(query.device) >= (8, 0)
    if not recent or width > 256 or width % 8:
        return None
    copies = sum(packed.path_lengths) / len(query)
    return _ByPath() if copies <= min(_MAX_COPIES, _MAX_COPIED / key.shape[1:].numel()) else _ByDepth()


_MAX_COPIES = 10
_MAX_COPIED = 6144
"""Copies of a key, and elements of these, on average over the tokens, up to which a call by paths is faster.

The gradients of copies take memory, for as many heads as queries have (docs/perf/gpu.md).
"""


# ---- merged calls


@dataclass(frozen=True)
class _Call:
    """A set of queries and the keys that they attend to; ``bounds`` holds the further arguments of the kernel.

    A call with ``within`` is causal, the last query at the last key. Each token is a query of one such call, and they
    are in the order of the tokens.
    """

    queries: slice | Tensor
    keys: slice | Tensor
    within: bool
    bounds: PaddedGroup | PackedSequences | Level | Paths | None

    @property
    def group(self) -> PaddedGroup | None:
        """The sequences of a batched call; None for a call with one sequence."""
        assert self.bounds is None or isinstance(self.bounds, PaddedGroup)
        return self.bounds

    @property
    def boundaries(self) -> tuple[Tensor, Tensor, int, int]:
        """The offsets of the sequences in queries and keys, and the longest of each."""
        if isinstance(self.bounds, Level | Paths):
            bounds = self.bounds
            return bounds.query_bounds, bounds.key_bounds, bounds.max_queries, bounds.max_keys
        assert isinstance(self.bounds, PackedSequences)
        offsets = self.bounds.cu_seqlens
        longest = self.bounds.max_length
        return offsets, offsets, longest, longest


class _Kernel(Protocol):
    """An attention kernel that also returns the log-sum-exp of the scores, by which calls over other keys are merged.

    Its inputs (t, H, D) are tokens of one packed row.
    """

    def calls(self, packed: PackedSequences) -> Iterator[_Call]:
        """Yield the calls that cover each pair of a token and a visible token of a forest once."""

    def forward(self, call: _Call, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """Return the output (t, H, D) and the logarithms of the sums (t, H)."""

    def backward(
        self,
        call: _Call,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sums: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this call's part of the gradients of query, key and value, given the merged output and sums."""


class _MergedContext(Kept, Protocol):
    packed: PackedSequences
    scale: float
    kernel: _Kernel


class _Merged(torch.autograd.Function):
    """Attention by calls of a kernel for parts of the keys; keeps query, key, value, output and sums."""

    @staticmethod
    def forward(
        ctx: _MergedContext,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        packed: PackedSequences,
        scale: float,
        kernel: _Kernel,
    ) -> Tensor:
        within, between = _by_kind(kernel.calls(packed))

        def attend(call: _Call) -> tuple[Tensor, Tensor]:
            parts = (_take(query, call.queries), _take(key, call.keys), _take(value, call.keys))
            return kernel.forward(call, *parts, scale)

        out, sums = _joined([attend(call) for call in within])
        for call in between:
            _merge(out, sums, call.queries, *attend(call))
        out = out.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, sums)
        ctx.packed = packed
        ctx.scale = scale
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: _MergedContext, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, sums = ctx.saved_tensors
        grad = grads[0].contiguous()
        within, between = _by_kind(ctx.kernel.calls(ctx.packed))

        def differentiate(call: _Call) -> tuple[Tensor, ...]:
            below = call.queries
            above = call.keys
            of_queries = (_take(grad, below), _take(query, below))
            of_keys = (_take(key, above), _take(value, above))
            of_output = (_take(out, below), _take(sums, below))
            return ctx.kernel.backward(call, *of_queries, *of_keys, *of_output, ctx.scale)

        wholes = _joined([differentiate(call) for call in within])
        for call in between:
            for whole, rows, part in zip(
                wholes, (call.queries, call.keys, call.keys), differentiate(call), strict=True
            ):
                _add(whole, rows, part)
        return *wholes, None, None, None


def _by_kind(calls: Iterator[_Call]) -> tuple[list[_Call], list[_Call]]:
    """Split the calls into those within nodes, which cover all rows in order, and all others."""
    every = list(calls)
    return [call for call in every if call.within], [call for call in every if not call.within]


def _joined(results: list[tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Return the results of calls, end to end."""
    if len(results) == 1:
        return results[0]
    return tuple(torch.cat(parts) for parts in zip(*results, strict=True))


def _take(whole: Tensor, rows: slice | Tensor) -> Tensor:
    """Return some rows: a view of a slice, a copy by an index."""
    return whole[rows] if isinstance(rows, slice) else whole.index_select(0, rows)


def _merge(out: Tensor, sums: Tensor, rows: slice | Tensor, found: Tensor, log_sum: Tensor) -> None:
    """Add an output (t, H, E) over more keys, with the logarithm of its sum (t, H), to some rows in place."""
    if out.is_cuda:
        from verl.utils.kernel.merged_rows import merge_rows

        merge_rows(out, sums, rows, found, log_sum)
        return
    merged = _take(out, rows)
    total_before = _take(sums, rows)
    total = torch.logaddexp(total_before, log_sum)
    merged.mul_((total_before - total).exp_().unsqueeze(-1)).addcmul_(found, (log_sum - total).exp_().unsqueeze(-1))
    total_before.copy_(total)
    if isinstance(rows, Tensor):
        out.index_copy_(0, rows, merged)
        sums.index_copy_(0, rows, total)


def _add(whole: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    """Add part of a gradient (t, H, D) to some rows in place."""
    if whole.is_cuda:
        from verl.utils.kernel.merged_rows import add_rows

        add_rows(whole, rows, part)
    elif isinstance(rows, slice):
        whole[rows] += part
    else:
        whole.index_add_(0, rows, part)


class _OnCpu:
    """torch's flash attention for a CPU, which needs sequences of equal length."""

    def calls(self, packed: PackedSequences) -> Iterator[_Call]:
        for group in packed.padded_groups:
            rows = slice(group.start, group.stop)
            yield _Call(rows, rows, True, group)
        for start, stop, end in packed.prefixes:
            yield _Call(slice(stop, end), slice(start, stop), False, None)

    def forward(self, call: _Call, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        parts = (_batched(each, call.group) for each in (query, key, value))
        out, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*parts, 0.0, call.within, scale=scale)
        exact = torch.promote_types(query.dtype, torch.float32)  # the dtype in which results are merged
        return _rows(out, call.group).to(exact), _rows(sums.unsqueeze(-1), call.group).squeeze(-1)

    def backward(
        self,
        call: _Call,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sums: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        parts = [_batched(each, call.group) for each in (grad, query, key, value, out, sums.unsqueeze(-1))]
        parts[-1] = parts[-1].squeeze(-1)
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        found = kernel(*parts, 0.0, call.within, scale=scale)
        of_query, of_key, of_value = (_rows(each, call.group) for each in found)
        return of_query, of_key, of_value


class _Flash:
    """torch's flash attention with boundaries, as ``torch.nn.attention.varlen`` calls it.

    The kernels are called directly, because that module's backward pass does not support merged outputs. Works with
    torch 2.11 to 2.13.
    """

    def forward(self, call: _Call, query: Tensor, key: Tensor, value: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        kernel = torch.ops.aten._flash_attention_forward
        out, sums, *_ = kernel(query, key, value, *call.boundaries, 0.0, call.within, False, scale=scale)
        return out, sums.transpose(0, 1)

    def backward(
        self,
        call: _Call,
        grad: Tensor,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        out: Tensor,
        sums: Tensor,
        scale: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        state = torch.zeros(2, dtype=torch.uint64, device=query.device)  # the random state of dropout, which is off
        unused = torch.empty(0, device=query.device)
        parts = (grad, query, key, value, out, sums.transpose(0, 1).contiguous())
        kernel = torch.ops.aten._flash_attention_backward
        of_query, of_key, of_value = kernel(*parts, *call.boundaries, 0.0, call.within, state, unused, scale=scale)
        return of_query, of_key, of_value


class _ByDepth(_Flash):
    """One kernel call within all nodes, and one for each depth at which nodes have children."""

    def calls(self, packed: PackedSequences) -> Iterator[_Call]:
        yield _Call(slice(None), slice(None), True, packed)
        for level in packed.levels:
            yield _Call(level.queries, level.keys, False, level)


class _ByPath(_Flash):
    """One call, in which each node attends to its whole path: a copy of keys and values instead of merging."""

    def calls(self, packed: PackedSequences) -> Iterator[_Call]:
        yield _Call(slice(None), packed.paths.keys, True, packed.paths)

    def backward(self, call: _Call, *given: Any) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(call.bounds, Paths)
        of_query, *of_copies = super().backward(call, *given)
        of_key, of_value = (_sum_copies(each, call.bounds) for each in of_copies)
        return of_query, of_key, of_value


def _sum_copies(copies: Tensor, paths: Paths) -> Tensor:
    """Return the sums over the copies of each token, (n, K, D) -> (T, K, D)."""
    if copies.is_cuda:
        from verl.utils.kernel.merged_rows import sum_rows

        return sum_rows(copies, paths.places, paths.place_bounds)
    found = copies.new_zeros(len(paths.place_bounds) - 1, *copies.shape[1:], dtype=torch.float32)
    return found.index_add_(0, paths.keys, copies.float()).to(copies.dtype)


def _batched(rows: Tensor, group: PaddedGroup | None) -> Tensor:
    """Return the sequences of a group, (t, H, D) -> (count, H, length, D), padded with zeros; without a group one."""
    if group is None:
        return rows.transpose(0, 1).unsqueeze(0)
    if group.index is not None:
        padded = rows.new_zeros(group.count * group.length, *rows.shape[1:])
        rows = padded.index_copy_(0, group.index, rows)
    return rows.view(group.count, group.length, *rows.shape[1:]).transpose(1, 2)


def _rows(batch: Tensor, group: PaddedGroup | None) -> Tensor:
    """Return the tokens of a group, (count, H, length, D) -> (t, H, D)."""
    if group is None:
        return batch[0].transpose(0, 1)
    rows = batch.transpose(1, 2).reshape(group.count * group.length, batch.shape[1], batch.shape[3])
    return rows if group.index is None else rows.index_select(0, group.index)


# ---- blocks of a mask


def _with_blocks(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    parts = (_batched(each, None) for each in (query, key, value))
    found: Tensor = _flex()(
        *parts, block_mask=packed.block_mask(), scale=scale, enable_gqa=grouped, kernel_options=_KERNEL
    )
    return found[0].transpose(0, 1)


_KERNEL = {"BACKEND": "TRITON"}
"""Not the kernel for decoding, which torch takes for fewer than 128 tokens and cannot compile for all of them."""


@cache
def _flex() -> Callable[..., Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=True)
