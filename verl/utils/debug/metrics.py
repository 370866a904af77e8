"""How far the rollout's log-probabilities are from the trainer's, from sums over parts of a batch."""

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from verl.protocol import DataProto

GAP_MAXIMA = frozenset({"log_gap_max", "gap_max"})
"""Those of ``gap_sums`` that combine by their maximum."""

_BLOCK_ROWS = 256
_CONSTANT = 1e-12
"""Variance relative to the mean square below which numbers are called equal: that of rounding in fp64 is less."""


def gap_sums(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """Return float64 sums over (b, R) tokens inside the mask, from which ``gap_metrics`` makes the metrics."""
    keep = mask.bool()
    ours, theirs = log_probs[keep].double(), rollout_log_probs[keep].double()
    log_gap = (ours - theirs).abs()
    x, y = ours.exp(), theirs.exp()
    gap = (x - y).abs()
    nothing = log_gap.new_zeros(1)
    sums = {"log_gap": log_gap, "gap": gap, "gap_sq": gap**2, "x": x, "y": y, "xx": x**2, "yy": y**2, "xy": x * y}
    return {
        "count": keep.sum().double(),
        "log_gap_max": torch.cat([log_gap, nothing]).max(),
        "gap_max": torch.cat([gap, nothing]).max(),
        **{name: value.sum() for name, value in sums.items()},
    }


def gap_metrics(sums: Mapping[str, float]) -> dict[str, Any]:
    """Return the metrics of a whole batch; with no token at all only ``valid`` = 0, and with equal probabilities of
    all tokens on one side no correlation.
    """
    count = sums["count"]
    if not count:
        return {"training/rollout_probs_diff_valid": 0}
    mean = {name: value / count for name, value in sums.items()}
    unbiased = count / max(count - 1, 1)
    metrics: dict[str, Any] = {
        "training/rollout_probs_diff_valid": 1,
        "training/rollout_probs_diff_max": sums["gap_max"],
        "training/rollout_probs_diff_mean": mean["gap"],
        "training/rollout_probs_diff_std": math.sqrt(max(mean["gap_sq"] - mean["gap"] ** 2, 0.0) * unbiased),
        "training/rollout_log_prob_diff_max": sums["log_gap_max"],
        "training/rollout_log_prob_diff_mean": mean["log_gap"],
    }
    spread_x, spread_y = mean["xx"] - mean["x"] ** 2, mean["yy"] - mean["y"] ** 2
    if spread_x > _CONSTANT * mean["xx"] and spread_y > _CONSTANT * mean["yy"]:
        correlation = (mean["xy"] - mean["x"] * mean["y"]) / math.sqrt(spread_x * spread_y)
        metrics["training/rollout_actor_probs_pearson_corr"] = min(max(correlation, -1.0), 1.0)
    return metrics


def calculate_debug_metrics(data: "DataProto") -> dict[str, Any]:
    """Compare ``rollout_log_probs`` with ``old_log_probs`` over the sampled tokens.

    Returns: the difference of the probabilities (``valid, max, mean, std``) and their correlation, where it is
        defined; the largest and mean absolute difference of the log-probabilities.
    """
    batch = data.batch
    assert batch is not None
    mask = batch["response_mask"] if "response_mask" in batch.keys() else batch["attention_mask"]
    columns = (batch["old_log_probs"], batch["rollout_log_probs"], mask[:, -batch["responses"].shape[-1] :])
    total: dict[str, float] = {}
    for block in zip(*(column.split(_BLOCK_ROWS) for column in columns), strict=True):
        for name, value in gap_sums(*block).items():
            before, number = total.get(name, 0.0), value.item()
            total[name] = max(before, number) if name in GAP_MAXIMA else before + number
    return gap_metrics(total)
