"""Draws by seed and position: their distribution, and what they depend on."""

import pytest
import torch
from torch import Tensor

from verl.utils.numerics import blocks
from verl.utils.numerics.blocks import on_blocks, product_on_blocks
from verl.utils.numerics.draws import draw_by_seed, keep_likely, log_probs_within


def chi_square_p(counts: Tensor, probabilities: Tensor) -> float:
    """The p-value of counts, with cells of fewer than 5 expected draws pooled."""
    expected = probabilities * counts.sum()
    rare = expected < 5
    pooled = torch.cat([expected[~rare], expected[rare].sum()[None]]).double()
    found = torch.cat([counts[~rare], counts[rare].sum()[None]]).double()
    chi_square = ((found - pooled) ** 2 / pooled)[pooled > 0].sum()
    freedom = (pooled > 0).sum() - 1
    assert freedom > 10
    return float(torch.special.gammaincc(freedom / 2, chi_square / 2))


@pytest.mark.parametrize("vary", ["seed", "position"])
def test_distribution(vary: str) -> None:
    weights = torch.rand(500, generator=torch.Generator().manual_seed(1)) ** 8
    index = torch.arange(40_000)
    same = torch.full_like(index, 7)
    seeds, positions = (index, same) if vary == "seed" else (same, index)
    counts = torch.zeros(500)
    for rows in index.split(4000):
        drawn = draw_by_seed(weights.expand(len(rows), -1), seeds[rows], positions[rows])
        counts += drawn.bincount(minlength=500)
    assert chi_square_p(counts, weights / weights.sum()) > 0.001


def test_neighbours_are_independent() -> None:
    """Pairs of draws at neighbouring positions, and at neighbouring seeds, cover all pairs alike."""
    index = torch.arange(20_000)
    same = torch.zeros_like(index)
    for one, other in (((same, index), (same, index + 1)), ((index, same), (index + 1, same))):
        pair = [draw_by_seed(torch.ones(len(index), 8), *place) for place in (one, other)]
        counts = (pair[0] * 8 + pair[1]).bincount(minlength=64).float()
        assert chi_square_p(counts, torch.full((64,), 1 / 64)) > 0.001


def test_a_draw_depends_on_its_own_row() -> None:
    weights = torch.rand(12, 50)
    seeds, positions = torch.randint(-(2**62), 2**62, (12,)), torch.arange(12)
    drawn = draw_by_seed(weights, seeds, positions)
    order = torch.randperm(12)
    assert draw_by_seed(weights[order], seeds[order], positions[order]).equal(drawn[order])
    assert draw_by_seed(weights[3:4], seeds[3:4], positions[3:4]).equal(drawn[3:4])
    assert draw_by_seed(weights[3:4] * 8, seeds[3:4], positions[3:4]).equal(drawn[3:4])
    assert draw_by_seed(torch.eye(50), torch.arange(50), torch.arange(50)).equal(torch.arange(50))


def test_limits_of_a_row() -> None:
    row = torch.tensor([0.1, 0.4, 0.05, 0.3, 0.15])
    limits = {  # top_k, top_p, min_p -> the tokens that are left
        (1 << 30, 1.0, 0.0): [0, 1, 2, 3, 4],
        (1, 1.0, 0.0): [1],
        (3, 1.0, 0.0): [1, 3, 4],
        (1 << 30, 0.6, 0.0): [1, 3],
        (1 << 30, 0.71, 0.0): [1, 3, 4],
        (2, 0.9, 0.0): [1, 3],
        (1 << 30, 1.0, 0.3): [1, 3, 4],
    }
    top_k, top_p, min_p = (torch.tensor(values) for values in zip(*limits, strict=True))
    kept = keep_likely(row.repeat(len(limits), 1), top_k, top_p, min_p)
    for found, left in zip(kept, limits.values(), strict=True):
        assert found.nonzero()[:, 0].tolist() == left
        assert found[left].equal(row[left])


@pytest.mark.parametrize("rows", [0, 1, 15, 16, 17, 40, 127, 300, 1500])
@pytest.mark.parametrize("sizes", [(33, 24), (256, 96), (64, 1000)], ids=str)
def test_products_on_blocks(rows: int, sizes: tuple[int, int]) -> None:
    columns, outputs = sizes
    x, weight, bias = torch.randn(1500, columns), torch.randn(outputs, columns), torch.randn(outputs)
    whole = product_on_blocks(x, weight, bias)
    assert product_on_blocks(x[:rows], weight, bias).equal(whole[:rows])
    linear = torch.nn.functional.linear
    assert on_blocks(lambda block: linear(block, weight, bias), x[:rows]).equal(whole[:rows])
    shifted = torch.cat([torch.zeros(5, columns), x[:rows]])  # other rows of other blocks
    assert product_on_blocks(shifted, weight, bias)[5:].equal(whole[:rows])
    torch.testing.assert_close(whole, linear(x, weight, bias))
    assert product_on_blocks(x.view(2, 750, columns), weight).shape == (2, 750, outputs)
    assert product_on_blocks(x.T.contiguous().T[:rows], weight, bias).equal(whole[:rows])


def test_larger_blocks_have_to_show_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight = torch.randn(64, 40), torch.randn(24, 40)
    plain = torch.nn.functional.linear
    asked: list[int] = []

    def other_order(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Add in another order in products of 48 and more rows, as some kernels do."""
        asked.append(len(rows))
        half = weight.shape[1] // 2
        if len(rows) < 48:
            return plain(rows, weight, bias)
        return plain(rows[:, half:], weight[:, half:]) + plain(rows[:, :half], weight[:, :half])

    monkeypatch.setattr(blocks, "_may_replace", {})
    monkeypatch.setattr(torch.nn.functional, "linear", other_order)
    blocks.product_on_blocks(x, weight)
    asked.clear()
    found = blocks.product_on_blocks(x, weight)
    assert max(asked) == 32 or set(asked) == {16}  # on some processors 32 rows have another order already
    assert found.equal(on_blocks(lambda block: plain(block, weight), x))

    asked.clear()
    zeros = torch.zeros(25, 40)
    for _ in range(4):
        assert not blocks.product_on_blocks(x, zeros).any()
    assert asked[-4:] == [16] * 4  # nothing is proved by a weight that gives zeros in any order


def test_log_probs_among_the_tokens_that_are_kept() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    kept = torch.tensor([[0.5, 0.3, 0.0], [0.5, 0.0, 0.0]])
    found = log_probs_within(probabilities.log(), kept, rows=torch.tensor([0]))
    torch.testing.assert_close(found.exp(), torch.tensor([[0.625, 0.375, 0.0], [0.5, 0.3, 0.2]]))
