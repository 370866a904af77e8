"""What no comparison of layouts shows: more rows of the same kind change no mean, and a mean in nats has a bound.

The same rows twice, under new uids, are the same data. Quantities that estimate a spread from a sample change by a
factor that is known: an unbiased variance divides by n - 1.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algos import mismatch
from verl.algos.advantage import ADV_ESTIMATOR_REGISTRY, estimate_advantages
from verl.algos.aggregate import UNITS, agg_loss, agg_sum, count_units
from verl.algos.names import IS_LEVELS, IS_MODES, LOSS_AGG_MODES
from verl.utils.torch_functional import entropy_from_logits

ROWS, WIDTH, VOCAB = 6, 5, 7
GROUPS = ["a", "a", "a", "b", "b", "b"]
WHITENED = {"gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"}
seeds = st.integers(0, 2**31 - 1)


def masks(seed: int) -> tuple[torch.Generator, Tensor]:
    """Return a generator and a mask with holes, whose last row only fills the batch."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.rand(ROWS, WIDTH, generator=generator) < 0.7).long()
    mask[:, 0] = 1
    mask[-1] = 0
    return generator, mask


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*(shape or (ROWS, WIDTH)), generator=generator, dtype=torch.float64)


def twice(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.cat([value, value])
    return np.concatenate([value, [f"{each} again" for each in value]])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=seeds, mode=st.sampled_from(LOSS_AGG_MODES), length=st.sampled_from([None, 3, 50]))
def test_aggregations(seed: int, mode: str, length: int | None) -> None:
    """Loss and gradient, of whole sequences and of segments of trajectories, in one part and in several."""
    generator, mask = masks(seed)
    shares = torch.rand(ROWS, generator=generator, dtype=torch.float64)
    for of_rows in (None, shares):
        found = []
        for copies in (1, 2):
            matrix = normal(torch.Generator().manual_seed(seed)).repeat(copies, 1).requires_grad_()
            kept, part = mask.repeat(copies, 1), None if of_rows is None else of_rows.repeat(copies)
            loss = agg_loss(matrix, kept, mode, length, part)
            (gradient,) = torch.autograd.grad(loss, matrix)
            cut = [
                agg_sum(matrix[r], kept[r], mode, length, part if part is None else part[r])
                for r in (slice(4), slice(4, None))
            ]
            count = count_units(kept, part)[UNITS.index(cut[0].unit)]
            found.append((loss, gradient[:ROWS] * copies, sum(each.total for each in cut) / count))
        torch.testing.assert_close(found[0], found[1])
        torch.testing.assert_close(found[0][0], found[0][2])


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=seeds, scale=st.sampled_from([0.0, 1.0, 10.0]))
def test_an_entropy_is_at_most_that_of_all_words(seed: int, scale: float) -> None:
    """In nats: ln V for a mean over tokens, T ln V for the sum over a sequence; equal when all words are as likely."""
    generator, mask = masks(seed)
    entropy = entropy_from_logits(scale * normal(generator, ROWS, WIDTH, VOCAB))
    longest = mask.sum(-1).max().item()
    bounds = {
        "token-mean": math.log(VOCAB),
        "seq-mean-token-mean": math.log(VOCAB),
        "seq-mean-token-sum": longest * math.log(VOCAB),
        "seq-mean-token-sum-norm": longest / WIDTH * math.log(VOCAB),
    }
    assert set(bounds) == set(LOSS_AGG_MODES)
    for mode, bound in bounds.items():
        assert 0 <= agg_loss(entropy, mask, mode).item() <= bound * (1 + 1e-12)
    if not scale:
        assert agg_loss(entropy, mask, "token-mean").item() == pytest.approx(math.log(VOCAB), rel=1e-12)


@pytest.mark.parametrize("name", sorted(ADV_ESTIMATOR_REGISTRY))
@settings(max_examples=8, deadline=None, derandomize=True)
@given(seed=seeds)
def test_estimators(name: str, seed: int) -> None:
    generator, mask = masks(seed)
    rows = {
        "token_level_rewards": normal(generator) * mask,
        "response_mask": mask,
        "values": normal(generator),
        "reward_baselines": normal(generator, ROWS),
        "index": np.array(GROUPS),
    }
    options: dict[str, Any] = {"gamma": 0.9, "lam": 0.8, "config": None}
    once = estimate_advantages(name, **rows, **options)
    again = estimate_advantages(name, **{key: twice(value) for key, value in rows.items()}, **options)
    count = int(mask.sum())
    sample = math.sqrt((count - 1) / count * 2 * count / (2 * count - 1))  # of the two unbiased deviations
    for which, (one, two) in enumerate(zip(once, again, strict=True)):
        is_whitened = which == 0 and name in WHITENED or name == "reinforce_plus_plus_baseline"
        expected = one / sample if is_whitened else one
        torch.testing.assert_close(two, twice(expected), rtol=1e-6, atol=1e-12)  # 1e-8 in the root of whitening


@pytest.mark.parametrize("level", IS_LEVELS)
@pytest.mark.parametrize("mode", IS_MODES)
@settings(max_examples=6, deadline=None, derandomize=True)
@given(seed=seeds, noise=st.sampled_from([0.0, 0.1, 3.0]))
def test_mismatch(level: str, mode: str, seed: int, noise: float) -> None:
    """Percentiles are left out: they are interpolated between neighbours, of which a sample has fewer."""
    generator, mask = masks(seed)
    old = -normal(generator).abs()
    columns = [old, old + noise * normal(generator), mask]
    once, again = (
        mismatch.compute_rollout_importance_weights(*each, level, mode, 1.5)[1]
        for each in (columns, map(twice, columns))
    )
    gaps = [
        mismatch.gap_metrics({name: value.item() for name, value in mismatch.gap_sums(*each).items()})
        for each in (columns, map(twice, columns))
    ]
    once, again = once | gaps[0], again | gaps[1]
    for name, n in (("mismatch/rollout_is_seq_std", ROWS - 1), ("training/rollout_probs_diff_std", int(mask.sum()))):
        again[name] *= math.sqrt((2 * n - 1) / (2 * n - 2))
    percentiles = {f"mismatch/rollout_is_p{p}" for p in mismatch.PERCENTILES}
    assert set(once) == set(again)
    for name in set(once) - percentiles:  # the deviation of equal weights is the root of a rounding error of 1e-17
        assert again[name] == pytest.approx(once[name], rel=1e-9, abs=1e-8), name


@settings(max_examples=20, deadline=None, derandomize=True)
@given(seed=seeds)
def test_perplexities_of_words_that_are_as_likely(seed: int) -> None:
    """Means over the tokens of a sequence: ln V nats and V words, whatever the lengths."""
    _, mask = masks(seed)
    log_probs = torch.full((ROWS, WIDTH), -math.log(VOCAB), dtype=torch.float64)
    found = mismatch.compute_mismatch_metrics(log_probs, log_probs, mask)
    for side in ("training", "rollout"):
        assert found[f"mismatch_{side}_log_ppl"] == pytest.approx(math.log(VOCAB), rel=1e-12)
        assert found[f"mismatch_{side}_ppl"] == pytest.approx(VOCAB, rel=1e-12)
