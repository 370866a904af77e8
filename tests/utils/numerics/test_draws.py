"""Draws by seed and position: their distribution, and what they depend on."""

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 40])
def test_products_on_blocks(rows: int) -> None:
    x, weight, bias = torch.randn(40, 33), torch.randn(7, 33), torch.randn(7)
    whole = product_on_blocks(x, weight, bias)
    assert product_on_blocks(x[:rows], weight, bias).equal(whole[:rows])
    assert on_blocks(lambda block: block @ weight.T + bias, x[:rows]).shape == (rows, 7)
    torch.testing.assert_close(whole, torch.nn.functional.linear(x, weight, bias))
    assert product_on_blocks(x.view(2, 20, 33), weight).shape == (2, 20, 7)


def test_log_probs_among_the_tokens_that_are_kept() -> None:
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.5, 0.3, 0.2]])
    kept = torch.tensor([[0.5, 0.3, 0.0], [0.5, 0.0, 0.0]])
    found = log_probs_within(probabilities.log(), kept, rows=torch.tensor([0]))
    torch.testing.assert_close(found.exp(), torch.tensor([[0.625, 0.375, 0.0], [0.5, 0.3, 0.2]]))
