"""Triton kernels for the row operations of attention over a forest, one pass each.

Imported only on a GPU. ``TRITON_INTERPRET=1`` runs the same kernels on a CPU, slowly, for tests.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024
"""Elements of a row that a program takes."""


@triton.jit
def _merge_kernel(
    out, sums, found, log_sum, rows, first, size, width, out_row, out_head, sums_row, sums_head, found_row, found_head,
    log_row, log_head, HAS_ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Move a row of ``out`` towards ``found`` by the share that its keys have in the sum over both."""
    at = tl.program_id(0).to(tl.int64)
    row = first + at
    if HAS_ROWS:
        row = tl.load(rows + at)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    head = place // width
    column = place % width
    own = tl.load(sums + row * sums_row + head * sums_head, mask=inside, other=0.0)
    more = tl.load(log_sum + at * log_row + head * log_head, mask=inside, other=0.0)
    to = out + row * out_row + head * out_head + column
    of = found + at * found_row + head * found_head + column
    old = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(of, mask=inside, other=0.0).to(tl.float32)
    merged = old + (new - old) * tl.sigmoid(more - own)
    tl.store(to, merged.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _add_kernel(
    whole, part, rows, first, size, width, whole_row, whole_head, part_row, part_head, HAS_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64)
    row = first + at
    if HAS_ROWS:
        row = tl.load(rows + at)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    head = place // width
    column = place % width
    to = whole + row * whole_row + head * whole_head + column
    of = part + at * part_row + head * part_head + column
    old = tl.load(to, mask=inside, other=0.0).to(tl.float32)
    new = tl.load(of, mask=inside, other=0.0).to(tl.float32)
    tl.store(to, (old + new).to(whole.dtype.element_ty), mask=inside)


@triton.jit
def _sum_kernel(whole, part, places, bounds, size, width, part_row, part_head, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    of = part + (place // width) * part_head + place % width
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for at in range(tl.load(bounds + row), tl.load(bounds + row + 1)):
        total += tl.load(of + tl.load(places + at) * part_row, mask=inside, other=0.0).to(tl.float32)
    tl.store(whole + row * size + place, total.to(whole.dtype.element_ty), mask=inside)


def merge_rows(out: Tensor, sums: Tensor, rows: slice | Tensor, found: Tensor, log_sum: Tensor) -> None:
    """Add attention over more keys to some rows, in place.

    Args: out is (T, H, E), and sums (T, H) the logarithms of its sums; found (t, H, E) and log_sum (t, H) those over
        the further keys, for ``rows``, which has no duplicates. The elements of a head lie side by side.
    """
    strides = (*_row_and_head(out), *sums.stride(), *_row_and_head(found), *log_sum.stride())
    _launch(_merge_kernel, (out, sums, found, log_sum), rows, found, strides)
    total = torch.logaddexp(sums[rows], log_sum)
    if isinstance(rows, slice):
        sums[rows] = total
    else:
        sums.index_copy_(0, rows, total)


def add_rows(whole: Tensor, rows: slice | Tensor, part: Tensor) -> None:
    """Add part (t, H, E) to some rows of whole (T, H, E), in place; ``rows`` has no duplicates."""
    _launch(_add_kernel, (whole, part), rows, part, (*_row_and_head(whole), *_row_and_head(part)))


def sum_rows(part: Tensor, places: Tensor, bounds: Tensor) -> Tensor:
    """Return sums of rows of part (n, H, E): for row i those at ``places[bounds[i]:bounds[i + 1]]``; rounded once.

    Args: places is (n,) and bounds (T + 1,), both int64. The result is (T, H, E).
    """
    _, heads, width = part.shape
    whole = part.new_empty(len(bounds) - 1, heads, width)
    size = heads * width
    grid = (len(whole), triton.cdiv(size, _BLOCK))
    _sum_kernel[grid](whole, part, places, bounds, size, width, *_row_and_head(part), BLOCK=_BLOCK)
    return whole


def _launch(
    kernel: Any, tensors: tuple[Tensor, ...], rows: slice | Tensor, of: Tensor, strides: tuple[int, ...]
) -> None:
    """Run a program for each row of ``of`` and block of its elements."""
    count, heads, width = of.shape
    index, first = (rows, 0) if isinstance(rows, Tensor) else (None, rows.start or 0)
    size = heads * width
    grid = (count, triton.cdiv(size, _BLOCK))
    kernel[grid](*tensors, index, first, size, width, *strides, HAS_ROWS=index is not None, BLOCK=_BLOCK)


def _row_and_head(heads: Tensor) -> tuple[int, int]:
    """Return the strides of rows and heads."""
    assert heads.stride(-1) == 1
    return heads.stride(0), heads.stride(1)
