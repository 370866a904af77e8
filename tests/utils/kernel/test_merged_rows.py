"""The row operations of merged attention against torch in float64; run by the interpreter of Triton, or on a GPU."""

import pytest
import torch

from verl.utils import envs

DEVICE = "cpu" if envs.flag("TRITON_INTERPRET") else "cuda"
pytestmark = pytest.mark.skipif(
    DEVICE == "cuda" and not torch.cuda.is_available(), reason="test_linear_cross_entropy.py runs it in the interpreter"
)
ROUNDING = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
ROWS = {"slice": slice(3, 9), "index": torch.tensor([0, 7, 3, 11])}


def drawn(*sizes: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def by_heads(rows: torch.Tensor) -> torch.Tensor:
    """Lay (T, H, E) out head by head, as a model gives queries to attention and attention gives outputs."""
    return rows.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("dtype", ROUNDING)
def test_triton_merges_rows(dtype: torch.dtype, rows: str) -> None:
    """With heads whose elements are no multiple of a block, and sums that lie head by head."""
    from verl.utils.kernel.merged_rows import merge_rows

    heads, width = 5, 264
    where = ROWS[rows] if rows == "slice" else ROWS[rows].to(DEVICE)
    out, sums = by_heads(drawn(12, heads, width, dtype=dtype)), 3 * drawn(heads, 12, seed=1).t()
    count = len(torch.arange(12, device=DEVICE)[where])
    found, log_sum = drawn(count, heads, width, dtype=dtype, seed=2), 3 * drawn(heads, count, seed=3).t()
    total = torch.logaddexp(sums[where].double(), log_sum.double())
    expected, of_sums = out.double(), sums.double()
    old, new = (each.double().unsqueeze(-1) for each in ((sums[where] - total).exp(), (log_sum - total).exp()))
    expected[where] = expected[where] * old + found.double() * new
    of_sums[where] = total
    merge_rows(out, sums, where, found, log_sum)
    torch.testing.assert_close(out.double(), expected, atol=ROUNDING[dtype], rtol=ROUNDING[dtype])
    torch.testing.assert_close(sums.double(), of_sums, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("rows", ROWS)
def test_triton_adds_rows(rows: str) -> None:
    from verl.utils.kernel.merged_rows import add_rows

    where = ROWS[rows] if rows == "slice" else ROWS[rows].to(DEVICE)
    whole = drawn(12, 3, 40)
    part = by_heads(drawn(len(whole[where]), 3, 40, seed=1))
    expected = whole.clone()
    expected[where] += part
    add_rows(whole, where, part)
    torch.testing.assert_close(whole, expected, atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype, rounding", [(torch.float32, 1e-6), (torch.bfloat16, 2**-7)])
def test_triton_sums_rows(dtype: torch.dtype, rounding: float) -> None:
    """Rows of no, one and several parts, rounded once; the interpreter rounds bf16 towards zero."""
    from verl.utils.kernel.merged_rows import sum_rows

    part = by_heads(drawn(9, 3, 400, dtype=dtype))
    places = torch.tensor([4, 0, 8, 1, 2, 3, 5, 6, 7], device=DEVICE)
    bounds = torch.tensor([0, 1, 1, 3, 9], device=DEVICE)
    expected = torch.zeros(4, 3, 400, dtype=torch.float64, device=DEVICE)
    rows = torch.arange(4, device=DEVICE).repeat_interleave(bounds.diff())
    expected.index_add_(0, rows, part[places].double())
    torch.testing.assert_close(sum_rows(part, places, bounds).double(), expected, atol=1e-6, rtol=rounding)
