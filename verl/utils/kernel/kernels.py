"""The two computations of a fused head in Triton: logits exist only in the registers of a program.

Imported only when the backend is selected. ``TRITON_INTERPRET=1`` runs the same kernels on a CPU, slowly, for tests.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from verl.utils.kernel.rows import LOWEST, Backend, HeadFormula, RowGrads, Rows, RowSums, rebase

PROGRAMS = 512
"""Number of programs that fill a GPU. If there are fewer blocks of rows, the vocabulary is split as well."""


@triton.jit
def _logits(
    hidden, weight, bias, row, column, rows, end, dim, hidden_stride, weight_stride, factor, cap_in, cap_out,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Return a tile of logits divided by the temperature; values outside the block are arbitrary."""
    product = tl.zeros((BLOCK_N, BLOCK_V), dtype=tl.float32)
    for at in range(0, dim, BLOCK_K):
        k = at + tl.arange(0, BLOCK_K)
        h = tl.load(
            hidden + row[:, None] * hidden_stride + k[None, :],
            mask=(row[:, None] < rows) & (k[None, :] < dim), other=0.0,
        )  # fmt: skip
        w = tl.load(
            weight + column[None, :] * weight_stride + k[:, None],
            mask=(column[None, :] < end) & (k[:, None] < dim), other=0.0,
        )  # fmt: skip
        product = tl.dot(h, w, product, input_precision=PRECISION)
    if HAS_BIAS:
        product += tl.load(bias + column, mask=column < end, other=0.0).to(tl.float32)[None, :]
    if HAS_CAP:
        # tanh(u) = 1 - 2 / (exp(2 u) + 1): right at both ends, where exp is 0 or infinite
        product = (1.0 - 2.0 / (tl.exp(2.0 * product * cap_in) + 1.0)) * cap_out
    else:
        product = product * factor
    return product


@triton.jit
def _row_sums_kernel(
    hidden, weight, bias, labels, largest, total, weighted, label, rows, columns, dim, split_width,
    hidden_stride, weight_stride, factor, cap_in, cap_out,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, FLOOR: tl.constexpr,
):  # fmt: skip
    """Write the sums of BLOCK_N rows over one split of the vocabulary, tile by tile with a running maximum."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    split = tl.program_id(1)
    wanted = tl.load(labels + row, mask=row < rows, other=-1)
    top = tl.full((BLOCK_N,), FLOOR, dtype=tl.float32)
    exp_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    pull_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    label_sum = tl.zeros((BLOCK_N,), dtype=tl.float32)
    end = tl.minimum((split + 1) * split_width, columns)
    for at in range(split * split_width, end, BLOCK_V):
        column = (at + tl.arange(0, BLOCK_V)).to(tl.int64)
        inside = (column < end)[None, :]
        x = _logits(
            hidden, weight, bias, row, column, rows, end, dim, hidden_stride, weight_stride, factor, cap_in, cap_out,
            HAS_BIAS, HAS_CAP, BLOCK_N, BLOCK_V, BLOCK_K, PRECISION,
        )  # fmt: skip
        label_sum += tl.sum(tl.where(inside & (column[None, :] == wanted[:, None]), x, 0.0), 1)
        new_top = tl.maximum(top, tl.max(tl.where(inside, x, FLOOR), 1))
        z = tl.where(inside, x - new_top[:, None], 0.0)
        exponential = tl.where(inside, tl.exp(z), 0.0)
        shift = top - new_top
        keep = tl.exp(shift)
        if WITH_ENTROPY:
            pull_sum = (pull_sum + shift * exp_sum) * keep + tl.sum(exponential * z, 1)
        exp_sum = exp_sum * keep + tl.sum(exponential, 1)
        top = new_top
    out = split * rows + row
    tl.store(largest + out, top, mask=row < rows)
    tl.store(total + out, exp_sum, mask=row < rows)
    tl.store(weighted + out, pull_sum, mask=row < rows)
    tl.store(label + out, label_sum, mask=row < rows)


@triton.jit
def _gradient_kernel(
    hidden, weight, bias, labels, log_sum, entropy, grad_log_probs, grad_entropy, grad, rows, start, end, dim,
    hidden_stride, weight_stride, factor, cap_in, cap_out, inverse_cap_out,
    HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr, WITH_ENTROPY: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_V: tl.constexpr, BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Write a tile of the gradient in the product with the weight.

    Tiles lie where the forward pass has them, at multiples of BLOCK_V, whatever the block's first column. A matrix
    product may round an element differently at another place of a tile, and the probabilities of a row sum to one only
    if its logits are those that ``log_sum`` was made from. Otherwise the error of a logit reaches the gradient in full,
    where it would shrink by 1 - p.
    """
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = ((start // BLOCK_V + tl.program_id(1)) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    x = _logits(
        hidden, weight, bias, row, column, rows, end, dim, hidden_stride, weight_stride, factor, cap_in, cap_out,
        HAS_BIAS, HAS_CAP, BLOCK_N, BLOCK_V, BLOCK_K, PRECISION,
    )  # fmt: skip
    there = row < rows
    log_p = x - tl.load(log_sum + row, mask=there, other=0.0)[:, None]
    own = tl.load(grad_log_probs + row, mask=there, other=0.0)[:, None]
    pull = own
    if WITH_ENTROPY:
        of_entropy = tl.load(grad_entropy + row, mask=there, other=0.0)[:, None]
        pull = own + of_entropy * (log_p + tl.load(entropy + row, mask=there, other=0.0)[:, None])
    wanted = tl.load(labels + row, mask=there, other=-1)
    result = tl.where(column[None, :] == wanted[:, None], own, 0.0) - tl.exp(log_p) * pull
    if HAS_CAP:
        ratio = x * inverse_cap_out
        result = result * (1.0 - ratio * ratio)
    result = result * factor
    at = row[:, None] * (end - start) + (column - start)[None, :]
    inside = ((column >= start) & (column < end))[None, :]
    tl.store(grad + at, result.to(grad.dtype.element_ty), mask=there[:, None] & inside)


def is_interpreted() -> bool:
    """Whether the kernels run in Triton's interpreter, which accepts CPU tensors."""
    return not isinstance(_row_sums_kernel, triton.JITFunction)


class TritonBackend(Backend):
    """The computations on CUDA, in bf16, fp16 and fp32."""

    def row_sums(self, rows: Rows, formula: HeadFormula, with_entropy: bool, chunk_rows: int) -> RowSums:
        """Return the sums over all columns; no logits are stored, so ``chunk_rows`` is not needed."""
        hidden = rows.hidden
        count = len(hidden)
        tiles = _tiles(rows)
        most = max(1, triton.cdiv(formula.columns, tiles["BLOCK_V"]))
        splits = min(triton.cdiv(PROGRAMS, triton.cdiv(max(count, 1), tiles["BLOCK_N"])), most)
        parts = hidden.new_zeros(4, splits, count, dtype=torch.float32)
        parts[0].fill_(LOWEST)
        if count and formula.columns:
            width = triton.cdiv(triton.cdiv(formula.columns, splits), tiles["BLOCK_V"]) * tiles["BLOCK_V"]
            grid = (triton.cdiv(count, tiles["BLOCK_N"]), splits)
            _row_sums_kernel[grid](
                *_operands(rows), *parts, count, formula.columns, hidden.shape[1], width, *_strides(rows),
                *_factors(formula), WITH_ENTROPY=with_entropy, FLOOR=LOWEST, **_switches(rows, formula), **tiles,
            )  # fmt: skip
        largest = parts[0].amax(0)
        sums = [part.sum(0) for part in rebase(RowSums(*parts), largest)]
        return RowSums(largest, *sums)

    def logits_gradient(self, rows: Rows, formula: HeadFormula, block: slice, grads: RowGrads) -> Tensor:
        """Return the gradient of a block of the vocabulary, its logits made in registers."""
        hidden = rows.hidden
        tiles = _tiles(rows)
        count = len(hidden)
        grad = hidden.new_empty(count, block.stop - block.start)
        inverse = 0.0 if formula.softcap is None else formula.temperature / formula.softcap
        tiles_across = triton.cdiv(block.stop, tiles["BLOCK_V"]) - block.start // tiles["BLOCK_V"]
        grid = (triton.cdiv(count, tiles["BLOCK_N"]), tiles_across)
        _gradient_kernel[grid](
            *_operands(rows), grads.log_sum, grads.log_sum if grads.entropy is None else grads.entropy,
            grads.grad_log_probs, grads.grad_entropy, grad, count, block.start, block.stop, hidden.shape[1],
            *_strides(rows), *_factors(formula), inverse, WITH_ENTROPY=grads.entropy is not None,
            **_switches(rows, formula), **tiles,
        )  # fmt: skip
        return grad


def _operands(rows: Rows) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the inputs of the kernels.

    Raises: ValueError for unsupported dtypes, and for rows that are not contiguous.
    """
    if (
        rows.hidden.dtype not in (torch.float32, torch.bfloat16, torch.float16)
        or rows.weight.dtype != rows.hidden.dtype
    ):
        raise ValueError(
            f"impl_backend=triton multiplies bf16, fp16 or fp32 of one kind, got hidden states in {rows.hidden.dtype} "
            f"and a weight in {rows.weight.dtype}: write torch"
        )
    if rows.hidden.stride(1) != 1 or rows.weight.stride(1) != 1:
        raise ValueError("impl_backend=triton needs hidden states and a weight whose rows are contiguous: write torch")
    return rows.hidden, rows.weight, rows.weight if rows.bias is None else rows.bias, rows.labels


def _strides(rows: Rows) -> tuple[int, int]:
    return rows.hidden.stride(0), rows.weight.stride(0)


def _factors(formula: HeadFormula) -> tuple[float, float, float]:
    """Return the factors of the product without a cap, of the product inside the tanh, and of the tanh."""
    if formula.softcap is None:
        return formula.scale / formula.temperature, 0.0, 0.0
    return (formula.scale / formula.temperature, formula.scale / formula.softcap, formula.softcap / formula.temperature)


def _switches(rows: Rows, formula: HeadFormula) -> dict[str, Any]:
    exact = torch.get_float32_matmul_precision() == "highest"
    return {
        "HAS_BIAS": rows.bias is not None,
        "HAS_CAP": formula.softcap is not None,
        "PRECISION": "ieee" if exact else "tf32",
    }


def _tiles(rows: Rows) -> dict[str, int]:
    """Return tile sizes: at most 72 KiB of operands in three stages, which fit every GPU since Ampere."""
    half = rows.hidden.element_size() == 2
    wide = 64 if half else 32
    return {"BLOCK_N": 64, "BLOCK_V": 128, "BLOCK_K": min(wide, max(16, triton.next_power_of_2(rows.hidden.shape[1])))}
