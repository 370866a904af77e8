"""The gap between rollout and trainer, from sums over parts, equals what the driver computes on the whole."""

from typing import Any

import pytest
import torch

from verl.algos.aggregate import UNITS, Extreme, count_units
from verl.algos.mismatch import calculate_debug_metrics, finish_gap_metrics, gap_sum_metrics
from verl.protocol import DataProto

ROWS, WIDTH = 6, 8
SPLITS = [[[0, 1, 2, 3, 4, 5]], [[0], [1], [2], [3], [4], [5]], [[2], [5, 0, 3], [4, 1]]]


def batch(noise: float, lengths: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    old = -3 * torch.rand(ROWS, WIDTH, generator=generator)
    mask = (torch.arange(WIDTH) < torch.tensor(lengths).unsqueeze(1)).long()
    rollout = old + noise * torch.randn(ROWS, WIDTH, generator=generator)
    return {
        "old_log_probs": old,
        "rollout_log_probs": torch.where(mask.bool(), rollout, 99.0),  # values outside the mask do not count
        "response_mask": mask,
        "responses": torch.zeros(ROWS, WIDTH, dtype=torch.long),
    }


def summed(data: dict[str, torch.Tensor], split: list[list[int]]) -> dict[str, float]:
    units = dict(zip(UNITS, count_units(data["response_mask"]).clamp(min=1).tolist(), strict=True))
    metrics: dict[str, Any] = {}
    for rows in split:
        part = gap_sum_metrics(*(data[n][rows] for n in ("old_log_probs", "rollout_log_probs", "response_mask")))
        for name, value in part.items():
            if isinstance(value, Extreme):
                assert value.kind == "max"
                metrics[name] = max(metrics.get(name, 0.0), value.value.item())
            else:
                metrics[name] = metrics.get(name, 0.0) + value.total.item() / units[value.unit]
    return finish_gap_metrics(metrics | {"other": 7.0})


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize(
    ("noise", "lengths"),
    [(0.3, [8, 1, 3, 0, 5, 2]), (1e-6, [8, 8, 8, 8, 8, 8]), (0.0, [3, 3, 3, 3, 3, 3]), (0.1, [0, 0, 1, 0, 0, 0])],
)
def test_equals_what_the_driver_computes(noise: float, lengths: list[int], split: list[list[int]]) -> None:
    data = batch(noise, lengths)
    wanted = calculate_debug_metrics(DataProto.from_dict(tensors=data))
    got = summed(data, split)
    assert got.pop("other") == 7.0
    assert got == pytest.approx(wanted, rel=1e-5, abs=1e-12)
    keep = data["response_mask"].bool()
    gap = (data["old_log_probs"] - data["rollout_log_probs"])[keep].abs().max().item()
    assert got["training/rollout_log_prob_diff_max"] == pytest.approx(gap)


def test_no_token_at_all() -> None:
    data = batch(0.1, [0] * ROWS)
    assert summed(data, SPLITS[2]) == {"training/rollout_probs_diff_valid": 0, "other": 7.0}
    assert calculate_debug_metrics(DataProto.from_dict(tensors=data)) == {"training/rollout_probs_diff_valid": 0}


def test_steps_without_the_sums_pass_through() -> None:
    assert finish_gap_metrics({"actor/pg_loss": 0.5}) == {"actor/pg_loss": 0.5}
