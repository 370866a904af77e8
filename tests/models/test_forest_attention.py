"""Attention over a forest equals attention under the dense mask, with its gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.utils.batch.test_forest import build, random_texts
from verl.models.transformers.attention import packed_attention
from verl.models.transformers.forest_attention import forest_attention
from verl.models.transformers.packed_sequences import PackedSequences

HEADS, GROUPS, WIDTH = 4, 2, 16


def dense(query: Tensor, key: Tensor, value: Tensor, packed: PackedSequences, scale: float | None) -> Tensor:
    at = torch.arange(len(query))
    sees = (at[None] <= at[:, None]) & (at[:, None] < packed.visible_until[None])
    q, k, v = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
    out = F.scaled_dot_product_attention(q, k, v, sees, scale=scale, enable_gqa=query.shape[1] != key.shape[1])
    return out[0].transpose(0, 1)


def inputs(tokens: int, dtype: torch.dtype, groups: int, value_width: int = WIDTH) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    sizes = ((HEADS, WIDTH), (groups, WIDTH), (groups, value_width))
    drawn = [torch.randn(tokens, *size, generator=generator).to(dtype) for size in sizes]
    # As a model gives them: heads first, and no copy.
    return [part.transpose(0, 1).contiguous().transpose(0, 1).requires_grad_() for part in drawn]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    "dtype, groups, value_width, tolerance",
    [
        (torch.float64, GROUPS, WIDTH, 1e-6),  # the kernel's exponentials are those of fp32
        (torch.float32, HEADS, WIDTH, 1e-5),  # rounding of sums over at most 100 tokens
        (torch.float32, GROUPS, WIDTH - 4, 1e-5),
        (torch.bfloat16, GROUPS, WIDTH, 5e-2),  # 8 bits of mantissa
    ],
)
def test_outputs_and_gradients(seed: int, dtype: torch.dtype, groups: int, value_width: int, tolerance: float) -> None:
    forest = build(random_texts(seed, count=12, depth=5), min_shared=2)[0]
    packed = PackedSequences(forest.lengths, "cpu", forest.ends)
    assert len(packed.prefixes) > 1
    scale = 0.3 if seed % 2 else None
    given = inputs(forest.num_tokens, dtype, groups, value_width)
    grad = torch.randn(forest.num_tokens, HEADS, value_width, generator=torch.Generator().manual_seed(1)).to(dtype)
    results = []
    for attend in (packed_attention, dense):
        out = attend(*given, packed, scale)
        out.backward(grad)
        results.append([out.detach(), *(part.grad for part in given)])
        for part in given:
            part.grad = None
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=tolerance, rtol=tolerance)


def test_blocks_of_the_mask() -> None:
    """``flex_attention``, which a GPU uses, with the same mask; torch has no gradient of it on a CPU."""
    from torch.nn.attention.flex_attention import flex_attention

    forest = build(random_texts(3, count=12, depth=5), min_shared=2)[0]
    packed = PackedSequences(forest.lengths, "cpu", forest.ends)
    with torch.no_grad():
        query, key, value = inputs(forest.num_tokens, torch.float32, GROUPS)
        parts = (part.transpose(0, 1).unsqueeze(0) for part in (query, key, value))
        found = flex_attention(*parts, block_mask=packed.block_mask, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(found, forest_attention(query, key, value, packed), atol=1e-5, rtol=1e-5)


def test_without_shared_tokens_nothing_changes() -> None:
    given = inputs(9, torch.float32, GROUPS)
    apart = PackedSequences([4, 5], "cpu", [4, 9])
    assert apart.prefixes == []
    assert torch.equal(packed_attention(*given, apart), packed_attention(*given, PackedSequences([4, 5], "cpu")))
