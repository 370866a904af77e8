"""Importance weights and mismatch metrics: by hand, against a slow float64 reference, and by invariance."""

import itertools
import math
import statistics

import numpy as np
import pytest
import torch

from verl.trainer.ppo.mismatch_helper import (
    compute_is_metrics,
    compute_mismatch_metrics,
    compute_rollout_importance_weights,
)

LEVELS, MODES = ("token", "sequence", "geometric"), ("truncate", "mask", "clip")


def clamped_exp(x):
    return math.exp(min(max(x, -20.0), 20.0))


def mean(values):
    return math.fsum(values) / len(values)


def percentile(values, percent):
    return float(np.percentile(np.array(values, dtype=np.float64), percent))


def reference(old, rollout, mask, level, mode, upper, lower, veto):
    """What the definitions say, token by token: (weights, metrics)."""
    lower = 1 / upper if lower is None else lower
    rows = [
        [(o, r, t) for t, (o, r, m) in enumerate(zip(*row, strict=True)) if m]
        for row in zip(old.tolist(), rollout.tolist(), mask.tolist(), strict=True)
    ]
    final = [[0.0] * mask.shape[1] for _ in rows]
    weights, ratios, of_row, extremes = [], [], [], []
    masked, masked_rows, high_rows, low_rows, vetoed, catastrophic = 0, 0, 0, 0, 0, 0
    for number, row in enumerate(rows):
        log_ratios = [o - r for o, r, _ in row]
        if not row:
            continue
        total = math.fsum(log_ratios)
        each = {"token": log_ratios, "sequence": [total] * len(row), "geometric": [total / len(row)] * len(row)}[level]
        w = [clamped_exp(x) for x in each]
        bad = [veto is not None and x < math.log(veto) for x in log_ratios]
        outside = [not lower <= x <= upper for x in w]
        for (_, _, t), x, is_outside in zip(row, w, outside, strict=True):
            kept = min(x, upper) if mode == "truncate" else (0.0 if is_outside else x)
            final[number][t] = 0.0 if any(bad) else kept
        weights += w
        ratios += log_ratios
        extremes += each
        of_row.append(mean(w))
        masked += sum(outside)
        masked_rows += any(outside)
        high_rows += max(w) > upper
        low_rows += min(w) < lower
        vetoed += any(bad)
        catastrophic += sum(bad)
    count, rows = len(weights), [row for row in rows if row]
    clamped = [min(max(x, lower), upper) for x in weights]
    share_high, share_low = mean([x > upper for x in weights]), mean([x < lower for x in weights])
    if level == "sequence":
        share_high, share_low = high_rows / len(rows), low_rows / len(rows)
    training = [mean([o for o, _, _ in row]) for row in rows]
    sampling = [mean([r for _, r, _ in row]) for row in rows]
    gaps = [s - t for s, t in zip(sampling, training, strict=True)]
    smallest, largest = min(extremes), max(extremes)
    metrics = {
        "rollout_is_mean": mean(weights),
        "rollout_is_std": statistics.pstdev(clamped),
        "rollout_is_max": math.exp(min(largest, 20.0)),
        "rollout_is_min": clamped_exp(smallest) if level == "token" else math.exp(min(smallest, 20.0)),
        "rollout_is_eff_sample_size": (mean(clamped) + 1e-8) ** 2 / mean([x * x for x in clamped]),
        "rollout_is_ratio_fraction_high": share_high,
        "rollout_is_ratio_fraction_low": share_low,
        "rollout_is_veto_fraction": vetoed / len(rows),
        "rollout_is_catastrophic_token_fraction": catastrophic / count,
        "rollout_is_seq_mean": mean(of_row),
        "rollout_is_seq_std": statistics.stdev(of_row) if len(of_row) > 1 else 0.0,
        "rollout_is_seq_max": max(of_row),
        "rollout_is_seq_min": min(of_row),
        "rollout_is_seq_max_deviation": max(abs(x - 1) for x in of_row),
        "rollout_is_seq_fraction_high": mean([x > upper for x in of_row]),
        "rollout_is_seq_fraction_low": mean([x < lower for x in of_row]),
        "mismatch_training_ppl": mean([math.exp(-x) for x in training]),
        "mismatch_training_log_ppl": -mean(training),
        "mismatch_rollout_ppl": mean([math.exp(-x) for x in sampling]),
        "mismatch_rollout_log_ppl": -mean(sampling),
        "mismatch_kl": -mean(ratios),
        "mismatch_k3_kl": mean([math.expm1(min(x, 20.0)) - x for x in ratios]),
        "mismatch_log_ppl_diff": mean(gaps),
        "mismatch_log_ppl_abs_diff": mean([abs(x) for x in gaps]),
        "mismatch_log_ppl_diff_max": max(gaps),
        "mismatch_log_ppl_diff_min": min(gaps),
        "mismatch_ppl_ratio": mean([math.exp(x) for x in gaps]),
    }
    metrics |= {f"rollout_is_p{p}": percentile(weights, p) for p in (25, 50, 75, 95, 99)}
    if mode != "truncate":
        metrics["rollout_is_masked_fraction"] = masked / count
        metrics["rollout_is_seq_masked_fraction"] = masked_rows / len(rows)
    if mode == "clip":
        metrics["rollout_is_clipped_fraction"] = masked / count
    return torch.tensor(final, dtype=torch.float64), {f"mismatch/{name}": value for name, value in metrics.items()}


def make(rows=9, width=13, noise=0.5, shift=0.0, seed=1, dtype=torch.float32):
    """Log-probabilities of rows of uneven length with a hole each, NaN and infinities outside the mask."""
    generator = torch.Generator().manual_seed(seed)
    old = -3 * torch.rand(rows, width, generator=generator, dtype=torch.float64)
    rollout = old - shift + noise * torch.randn(rows, width, generator=generator, dtype=torch.float64)
    lengths = torch.randint(1, width + 1, (rows, 1), generator=generator)
    mask = (torch.arange(width) < lengths).long()
    mask[:, width // 2] = 0
    mask[:, 0] = 1
    outside = torch.tensor([math.nan, math.inf, -math.inf, 7.0])[torch.arange(rows * width).view(rows, width) % 4]
    old, rollout = (torch.where(mask.bool(), x, y) for x, y in ((old, outside), (rollout, outside.flip(0))))
    return old.to(dtype), rollout.to(dtype), mask


def close(found, wanted, rel=2e-5, abs=2e-6):
    assert found.keys() == wanted.keys()
    wrong = {k: (found[k], wanted[k]) for k in wanted if found[k] != pytest.approx(wanted[k], rel=rel, abs=abs)}
    assert not wrong


@pytest.mark.parametrize("veto", [None, 0.3, 1e-4])
@pytest.mark.parametrize(("level", "mode"), list(itertools.product(LEVELS, MODES)))
def test_equals_the_definitions(level, mode, veto):
    for (upper, lower), shift, dtype in [
        ((2.0, None), 0.0, torch.float32),
        ((1.2, 0.3), 0.1, torch.float64),
        ((0.8, 0.6), 0.0, torch.float32),  # both below one: padding, of ratio one, lies outside
        ((3.0, 1.1), -0.2, torch.float32),
        ((2.0, None), -4.0, torch.float32),  # every ratio far below one
        ((1e9, None), 30.0, torch.float32),  # every ratio beyond what is exponentiated
    ]:
        batch = make(shift=shift, dtype=dtype)
        weights, metrics = compute_rollout_importance_weights(*batch, level, mode, upper, lower, veto)
        wanted, wanted_metrics = reference(*batch, level, mode, upper, lower, veto)
        found = weights.batch["rollout_is_weights"]
        assert found.dtype == dtype and list(weights.batch.keys()) == ["rollout_is_weights"]
        torch.testing.assert_close(found.double(), wanted, rtol=2e-5, atol=1e-9)
        spread = wanted_metrics["mismatch/rollout_is_mean"] * 1e-3 if upper > 1e6 else 2e-6
        close(metrics, wanted_metrics, abs=spread)
        names = {name.removeprefix("mismatch/"): value for name, value in metrics.items()}
        parts = compute_is_metrics(*batch, level, mode, upper, lower, veto), compute_mismatch_metrics(*batch)
        assert not parts[0].keys() & parts[1].keys() and parts[0] | parts[1] == names


def test_by_hand():
    """Ratios (2, 1/2, 1), (4, 1): with threshold 3, one token is capped, or masked with its sequence not."""
    old = torch.log(torch.tensor([[0.5, 0.25, 0.5], [0.8, 0.5, 9.9]]))
    rollout = torch.log(torch.tensor([[0.25, 0.5, 0.5], [0.2, 0.5, 0.1]]))
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    found = {}
    for level, mode in itertools.product(LEVELS, ("truncate", "mask")):
        data, metrics = compute_rollout_importance_weights(old, rollout, mask, level, mode, 3.0)
        found[level, mode] = data.batch["rollout_is_weights"].tolist(), metrics
    expected = {
        ("token", "truncate"): [[2, 0.5, 1], [3, 1, 0]],
        ("token", "mask"): [[2, 0.5, 1], [0, 1, 0]],
        ("sequence", "truncate"): [[1, 1, 1], [3, 3, 0]],
        ("sequence", "mask"): [[1, 1, 1], [0, 0, 0]],
        ("geometric", "truncate"): [[1, 1, 1], [2, 2, 0]],
        ("geometric", "mask"): [[1, 1, 1], [2, 2, 0]],
    }
    for key, weights in expected.items():
        assert found[key][0] == [pytest.approx(row, abs=1e-6) for row in weights], key
    metrics = found["token", "mask"][1]
    assert metrics["mismatch/rollout_is_mean"] == pytest.approx(8.5 / 5)
    assert metrics["mismatch/rollout_is_p50"] == pytest.approx(1.0)
    assert metrics["mismatch/rollout_is_p75"] == pytest.approx(2.0)
    assert metrics["mismatch/rollout_is_p95"] == pytest.approx(2 + 0.8 * 2)  # position 3.8 of (1/2, 1, 1, 2, 4)
    assert metrics["mismatch/rollout_is_masked_fraction"] == pytest.approx(1 / 5)
    assert metrics["mismatch/rollout_is_seq_masked_fraction"] == 0.5
    # weights clamped to [1/3, 3]: (2, 1/2, 1, 3, 1), mean 1.5, mean square 3.05
    assert metrics["mismatch/rollout_is_eff_sample_size"] == pytest.approx(1.5**2 / 3.05)
    assert metrics["mismatch/rollout_is_std"] == pytest.approx(math.sqrt(3.05 - 1.5**2))
    assert metrics["mismatch/mismatch_kl"] == pytest.approx(-math.log(4) / 5, abs=1e-7)
    assert metrics["mismatch/mismatch_k3_kl"] == pytest.approx((8.5 - math.log(4)) / 5 - 1)
    assert metrics["mismatch/mismatch_ppl_ratio"] == pytest.approx((1 + 1 / 2) / 2)
    # a veto of 0.6 drops the first sequence, for its ratio of one half
    data, metrics = compute_rollout_importance_weights(old, rollout, mask, rollout_is_threshold=3.0,
                                                       rollout_is_veto_threshold=0.6)  # fmt: skip
    assert data.batch["rollout_is_weights"][0].tolist() == [0, 0, 0]
    assert metrics["mismatch/rollout_is_veto_fraction"] == 0.5
    assert metrics["mismatch/rollout_is_catastrophic_token_fraction"] == pytest.approx(1 / 5)


@pytest.mark.parametrize("threshold", [1.5, 3.0])
def test_token_level_truncate(threshold):
    """Each weight is its ratio, at most the threshold; small ratios stay, and nothing is added to the denominator."""
    ratio = torch.tensor([[0.2, 1.0, 2.0], [1.6, 9.0, 7.0]])
    rollout, mask = torch.full((2, 3), -2.0), torch.tensor([[1, 1, 1], [1, 1, 0]])
    data, metrics = compute_rollout_importance_weights(
        rollout + ratio.log(), rollout, mask, "token", "truncate", threshold, None, None
    )
    torch.testing.assert_close(data.batch["rollout_is_weights"], ratio.clamp(max=threshold) * mask)
    assert metrics["mismatch/rollout_is_max"] == pytest.approx(9.0)
    assert metrics["mismatch/rollout_is_veto_fraction"] == 0.0


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_weights_make_what_the_rollout_samples_an_estimate_for_training(level):
    """Over all sequences of two tokens: a mean under the rollout, weighted, is the mean under training."""
    generator = torch.Generator().manual_seed(4)
    training, rollout = (torch.randn(2, 5, generator=generator).log_softmax(-1) for _ in range(2))
    sequences = torch.tensor(list(itertools.product(range(5), repeat=2)))
    old, sampled = (
        torch.stack([table[0, sequences[:, 0]], table[1, sequences[:, 1]]], -1) for table in (training, rollout)
    )
    data, _ = compute_rollout_importance_weights(old, sampled, torch.ones(25, 2), level, "mask", 1e6, None, None)
    weights = data.batch["rollout_is_weights"]
    if level == "token":
        values = torch.randn(2, 5, generator=generator)[torch.arange(2), sequences]  # of a token, where it stands
    else:
        values = torch.randn(25, 1, generator=generator)  # of the sequence
    wanted = (old.sum(-1, keepdim=True).exp() * values).sum(0)
    unweighted, found = ((sampled.sum(-1, keepdim=True).exp() * values * w).sum(0) for w in (1.0, weights))
    torch.testing.assert_close(found, wanted.expand_as(found), rtol=1e-4, atol=1e-6)
    assert (unweighted - wanted).abs().min() > 0.01


def test_without_a_threshold_it_is_off():
    assert compute_rollout_importance_weights(*make()) == (None, {})


@pytest.mark.parametrize("level", LEVELS)
def test_extreme_ratios_stay_finite(level):
    old, rollout = torch.tensor([[-1e4, 0.0], [0.0, -0.5]]), torch.tensor([[0.0, -1e4], [-800.0, -0.5]])
    mask = torch.ones(2, 2)
    data, metrics = compute_rollout_importance_weights(old, rollout, mask, level, "truncate", 2.0, None, None)
    assert data.batch["rollout_is_weights"].isfinite().all() and data.batch["rollout_is_weights"].max() == 2.0
    assert metrics["mismatch/rollout_is_max"] == pytest.approx(math.exp(20), rel=1e-6)
    checked = {k: v for k, v in metrics.items() if not k.endswith(("_ppl", "ppl_ratio"))}
    assert all(map(math.isfinite, checked.values()))


def test_equal_engines_are_exactly_equal():
    old, _, mask = make()
    data, metrics = compute_rollout_importance_weights(old, old.clone(), mask, "token", "mask", 2.0)
    assert torch.equal(data.batch["rollout_is_weights"], mask.float())
    ones = ("mean", "max", "min", "eff_sample_size", "seq_mean", "seq_max", "seq_min", *map("p{}".format, (25, 99)))
    assert [metrics[f"mismatch/rollout_is_{name}"] for name in ones] == pytest.approx([1.0] * len(ones), abs=1e-7)
    for name in ("rollout_is_std", "rollout_is_masked_fraction", "mismatch_kl", "mismatch_k3_kl"):
        assert metrics[f"mismatch/{name}"] == 0.0


def test_a_small_gap_keeps_its_digits():
    """In fp32 a gap of 1e-5 gives a K3 of 5e-11 and a spread of 1e-5: differences of large sums would lose both."""
    generator = torch.Generator().manual_seed(0)
    old = -torch.rand(50, 200, generator=generator) * 2
    rollout = old + 1e-5 * torch.randn(50, 200, generator=generator)
    ratio = old.double() - rollout.double()
    metrics = compute_rollout_importance_weights(old, rollout, torch.ones(50, 200), rollout_is_threshold=2.0)[1]
    assert metrics["mismatch/mismatch_k3_kl"] == pytest.approx((ratio.expm1() - ratio).mean().item(), rel=0.02)
    assert metrics["mismatch/rollout_is_std"] == pytest.approx(ratio.exp().std(correction=0).item(), rel=1e-3)


# ---- invariances


@pytest.mark.parametrize("level", LEVELS)
def test_order_of_rows_and_padding_change_nothing(level):
    batch = make(rows=300, width=60)
    data, metrics = compute_rollout_importance_weights(*batch, level, "mask", 1.5, None, 0.25)
    weights = data.batch["rollout_is_weights"]
    assert 0.01 < metrics["mismatch/rollout_is_veto_fraction"] < 0.99
    order = torch.randperm(300, generator=torch.Generator().manual_seed(2))
    moved, found = compute_rollout_importance_weights(*(x[order] for x in batch), level, "mask", 1.5, None, 0.25)
    assert torch.equal(moved.batch["rollout_is_weights"], weights[order])
    close(found, metrics, rel=1e-12, abs=1e-14)
    padded = [torch.nn.functional.pad(x, (17, 40), value=value) for x, value in zip(batch, (9.0, -9.0, 0), strict=True)]
    moved, found = compute_rollout_importance_weights(*padded, level, "mask", 1.5, None, 0.25)
    torch.testing.assert_close(moved.batch["rollout_is_weights"][:, 17:-40], weights, rtol=1e-6, atol=0)
    assert moved.batch["rollout_is_weights"].sum() == pytest.approx(weights.sum().item())
    close(found, metrics, rel=1e-5, abs=1e-7)
    empty = [torch.cat([x, torch.zeros_like(x[:5])]) for x in batch]  # sequences without a token count for nothing
    close(compute_rollout_importance_weights(*empty, level, "mask", 1.5, None, 0.25)[1], metrics, rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("kind", [torch.bool, torch.int64, torch.float32, torch.bfloat16])
def test_every_kind_of_mask_and_number(kind):
    old, rollout, mask = make()
    wanted = compute_rollout_importance_weights(old, rollout, mask, rollout_is_threshold=2.0)[1]
    close(compute_rollout_importance_weights(old, rollout, mask.to(kind), rollout_is_threshold=2.0)[1], wanted, rel=0)
    half = [x.to(torch.bfloat16) for x in (old, rollout)]
    found = compute_rollout_importance_weights(*half, mask.to(kind), rollout_is_threshold=2.0)
    assert found[0].batch["rollout_is_weights"].dtype == torch.float32
    close(found[1], compute_rollout_importance_weights(*(x.float() for x in half), mask, rollout_is_threshold=2.0)[1])


@pytest.mark.parametrize("level", LEVELS)
def test_inputs_stay_as_they_are(level):
    batch = make()
    before = [x.clone() for x in batch]
    data, _ = compute_rollout_importance_weights(*batch, level, rollout_is_threshold=2.0)
    assert all(torch.equal(x.nan_to_num(), y.nan_to_num()) for x, y in zip(batch, before, strict=True))
    state = torch.random.get_rng_state()
    data.batch["rollout_is_weights"].zero_()
    assert torch.equal(state, torch.random.get_rng_state())


def test_more_than_16_million_tokens():
    """Beyond 2**24, where some operations end; the rows repeat, so the figures are those of a few of them."""
    old, rollout, _ = (x.nan_to_num(-1.0, -1.0, -1.0) for x in make(rows=3, width=4200, noise=0.3))
    few = [old, rollout, torch.ones(3, 4200)]
    many = [x.repeat(1400, 1) for x in few[:2]] + [torch.ones(1, 1, dtype=torch.bool).expand(4200, 4200)]
    assert many[0].numel() > 2**24
    data, metrics = compute_rollout_importance_weights(*many, rollout_is_threshold=2.0)
    wanted, wanted_metrics = compute_rollout_importance_weights(*few, rollout_is_threshold=2.0)
    assert torch.equal(data.batch["rollout_is_weights"][-3:], wanted.batch["rollout_is_weights"])
    weights = np.sort((few[0].double() - few[1].double()).exp().numpy().ravel())  # 1400 times each
    for percent in (25, 50, 75, 95, 99):
        position = percent * (many[0].numel() - 1) / 100
        low, high = weights[math.floor(position) // 1400], weights[math.ceil(position) // 1400]
        wanted = low + (high - low) * (position % 1)
        assert metrics[f"mismatch/rollout_is_p{percent}"] == pytest.approx(wanted, rel=1e-6)
    few_only = ("rollout_is_seq_std", *(f"rollout_is_p{p}" for p in (25, 50, 75, 95, 99)))  # of a sample of three
    for name in few_only:
        metrics.pop(f"mismatch/{name}"), wanted_metrics.pop(f"mismatch/{name}")
    close(metrics, wanted_metrics, rel=1e-6)


# ---- what is refused


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"rollout_is_level": "word"}, "algorithm.rollout_is_level=word: must be one of token, sequence, geometric"),
        ({"rollout_is_mode": "drop"}, "algorithm.rollout_is_mode=drop: must be one of truncate, mask, clip"),
        ({"rollout_is_threshold": 0.0}, "algorithm.rollout_is_threshold=0.0: must be above 0"),
        ({"rollout_is_threshold": 0.5}, "must be at least 1, since rollout_is_threshold_lower=null"),
        ({"rollout_is_threshold_lower": 3.0}, "must be at most rollout_is_threshold=2.0"),
        ({"rollout_is_threshold_lower": -1.0}, "algorithm.rollout_is_threshold_lower=-1.0: must be above 0"),
        ({"rollout_is_veto_threshold": 1.0}, "algorithm.rollout_is_veto_threshold=1.0: must be above 0 and below 1"),
        ({"rollout_log_prob": torch.zeros(3, 4)}, r"must have one shape \(B, T\)"),
        ({"rollout_log_prob": torch.full((9, 13), math.nan)}, "rollout_log_prob holds NaN .* in rows 0, 1, 2, 3, 4,"),
        ({"old_log_prob": torch.full((9, 13), -math.inf)}, "old_log_prob holds NaN or an infinity"),
    ],
)
def test_wrong_arguments(changes, text):
    old, rollout, mask = make()
    arguments = {"old_log_prob": old, "rollout_log_prob": rollout, "response_mask": mask, "rollout_is_threshold": 2.0}
    with pytest.raises(ValueError, match=text):
        compute_rollout_importance_weights(**(arguments | changes))


@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
@pytest.mark.parametrize("error", [AssertionError, ValueError])
def test_an_empty_mask(shape, error):
    nothing = [torch.zeros(shape)] * 3
    for call in (
        lambda: compute_rollout_importance_weights(*nothing, rollout_is_threshold=2.0),
        lambda: compute_is_metrics(*nothing),
        lambda: compute_mismatch_metrics(*nothing),
    ):
        with pytest.raises(error, match="response_mask keeps no token"):
            call()


def test_without_a_rollout_only_the_training_side_is_known():
    old, rollout, mask = make()
    found = compute_mismatch_metrics(old, None, mask)
    assert found.keys() == {"mismatch_training_ppl", "mismatch_training_log_ppl"}
    both = compute_mismatch_metrics(old, rollout, mask)
    assert found.items() <= both.items()
