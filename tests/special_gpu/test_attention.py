"""The kernels of a GPU for packed rows and forests equal attention under the dense mask in float64.

Tolerances: half precision has 8 (bf16) or 11 (fp16) bits of mantissa, and results may be a few roundings of their
largest element apart; fp32 sums of up to some hundred terms are within 1e-5 of it.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.models.test_forest_attention import dense
from tests.utils.batch.test_forest import build, random_texts
from verl.models.transformers import attention, forest_attention
from verl.models.transformers.attention import packed_attention
from verl.models.transformers.packed_sequences import PackedSequences

ROUNDING = {torch.bfloat16: 2e-2, torch.float16: 3e-3, torch.float32: 1e-5}


def drawn(tokens: int, heads: int, width: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    # As a model gives them: heads first, and no copy.
    return torch.randn(heads, tokens, width, generator=generator).to("cuda", dtype).transpose(0, 1).requires_grad_()


def results(attend: Any, given: list[Tensor], grad: Tensor, *rest: Any) -> list[Tensor]:
    out = attend(*given, *rest)
    out.backward(grad.to(out))
    found = [out.detach(), *(part.grad for part in given)]
    for part in given:
        part.grad = None
    return found


def assert_as_dense(given: list[Tensor], packed: PackedSequences, scale: float | None) -> None:
    dtype = given[0].dtype
    grad = drawn(given[0].shape[0], given[0].shape[1], given[2].shape[2], dtype, 9).detach()
    found = results(packed_attention, given, grad, packed, scale)
    exact = [part.detach().double().cpu().requires_grad_() for part in given]
    on_cpu = PackedSequences(
        packed.lengths, "cpu", packed.ends or [sum(packed.lengths[: i + 1]) for i in range(len(packed.lengths))]
    )
    for result, expected in zip(found, results(dense, exact, grad.cpu(), on_cpu, scale), strict=True):
        assert result.dtype == dtype
        apart = (result.double().cpu() - expected).abs().max()
        assert apart <= ROUNDING[dtype] * expected.abs().max()


SHAPES = [
    (torch.bfloat16, 4, 2, 64, 64),
    (torch.bfloat16, 14, 2, 64, 64),
    (torch.bfloat16, 4, 4, 128, 96),  # narrower values, as of latent attention
    (torch.float16, 4, 1, 256, 256),
    (torch.float16, 8, 8, 40, 40),
    (torch.float32, 4, 2, 64, 64),
    (torch.float32, 4, 2, 24, 16),
    (torch.bfloat16, 4, 2, 60, 60),  # which flash attention does not take
]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("dtype, heads, groups, width, value_width", SHAPES)
def test_forests(
    monkeypatch: pytest.MonkeyPatch,
    dtype: torch.dtype,
    heads: int,
    groups: int,
    width: int,
    value_width: int,
    seed: int,
) -> None:
    """Every kernel that takes the dtype and head size."""
    forest = build(random_texts(seed, count=12, depth=5), min_shared=2)[0]
    packed = PackedSequences(forest.lengths, "cuda", forest.ends)
    assert len(packed.prefixes) > 1
    sizes = ((heads, width), (groups, width), (groups, value_width))
    given = [drawn(forest.num_tokens, *size, dtype, at) for at, size in enumerate(sizes)]
    scale = 0.3 if seed else None
    chosen = forest_attention._kernel_for(given[0], given[1], packed)
    assert isinstance(chosen, forest_attention._Flash) == (dtype != torch.float32 and width % 8 == 0)
    for kernel in (forest_attention._ByDepth(), forest_attention._ByPath()) if chosen else (None,):
        monkeypatch.setattr(forest_attention, "_kernel_for", lambda *_, kernel=kernel: kernel)
        assert_as_dense(given, packed, scale)


@pytest.mark.parametrize(
    "dtype, kernel", [(torch.bfloat16, "_ByDepth"), (torch.bfloat16, "_ByPath"), (torch.float32, None)]
)
def test_long_prompts(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, kernel: str | None) -> None:
    """Two prompts longer than a tile of any kernel, with samples of several lengths, and a row that is alone."""
    lengths, ends = [700, 130, 1, 257, 333, 64, 64, 90], [1088, 830, 831, 1088, 1549, 1485, 1549, 1639]
    packed = PackedSequences(lengths, "cuda", ends)
    given = [drawn(sum(lengths), *size, dtype, at) for at, size in enumerate(((4, 64), (2, 64), (2, 64)))]
    monkeypatch.setattr(forest_attention, "_kernel_for", lambda *_: kernel and getattr(forest_attention, kernel)())
    assert_as_dense(given, packed, None)


@pytest.mark.parametrize("dtype, heads, groups, width, value_width", SHAPES)
def test_rows_end_to_end(dtype: torch.dtype, heads: int, groups: int, width: int, value_width: int) -> None:
    lengths = [5, 1, 77, 300, 12]
    packed = PackedSequences(lengths, "cuda")
    sizes = ((heads, width), (groups, width), (groups, value_width))
    assert_as_dense([drawn(sum(lengths), *size, dtype, at) for at, size in enumerate(sizes)], packed, None)


def test_windows() -> None:
    lengths, window = [40, 9, 130], 16
    packed = PackedSequences(lengths, "cuda")
    given = [drawn(sum(lengths), *size, torch.bfloat16, at) for at, size in enumerate(((4, 64), (2, 64), (2, 64)))]
    found = attention.packed_attention(*given, packed, window=window)
    exact = [part.detach().float().cpu() for part in given]
    expected = attention.packed_attention(*exact, PackedSequences(lengths, "cpu"), window=window)
    assert (found.float().cpu() - expected).abs().max() <= ROUNDING[torch.bfloat16] * expected.abs().max()
