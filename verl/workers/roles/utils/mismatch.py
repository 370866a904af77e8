"""How far the engine that sampled a response is from the model that trains on it, from sums over micro-batches.

The driver computes the same figures (``verl.utils.debug.metrics``) where the old log-probabilities reach it. In a
single on-policy update they never do, so the pieces are summed beside the loss and put together afterwards.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from verl.algos.aggregate import Extreme, Metric, Sum

_SUMS = "training/rollout_sums/"
_VALID = "training/rollout_probs_diff_valid"
_FIGURES = ("training/rollout_log_prob_diff_", "training/rollout_probs_diff_")


def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return the sums over a micro-batch from which ``finish_mismatch`` makes the metrics. Tensors are (b, R)."""
    keep = mask.bool()
    log_gap = (log_probs - rollout_log_probs)[keep].abs().double()
    actor, rollout = log_probs[keep].double().exp(), rollout_log_probs[keep].double().exp()
    gap = (actor - rollout).abs()
    count = keep.sum().double()
    if not gap.numel():
        log_gap = gap = actor = rollout = torch.zeros(1, dtype=torch.float64, device=mask.device)
    sums = {"x": actor, "y": rollout, "xx": actor**2, "yy": rollout**2, "xy": actor * rollout, "gap_sq": gap**2}
    return {
        "training/rollout_log_prob_diff_max": Extreme(log_gap.max(), "max"),
        "training/rollout_log_prob_diff_mean": Sum(log_gap.sum(), "token"),
        "training/rollout_probs_diff_max": Extreme(gap.max(), "max"),
        "training/rollout_probs_diff_mean": Sum(gap.sum(), "token"),
        _SUMS + "count": Sum(count, "constant"),
        **{_SUMS + name: Sum(value.sum(), "token") for name, value in sums.items()},
    }


def finish_mismatch(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the means of the sums by standard deviation and correlation; other metrics pass through."""
    means = {name.removeprefix(_SUMS): value for name, value in metrics.items() if name.startswith(_SUMS)}
    rest = {name: value for name, value in metrics.items() if not name.startswith(_SUMS)}
    if not means:
        return rest
    if not means["count"]:
        return {name: value for name, value in rest.items() if not name.startswith(_FIGURES)} | {_VALID: 0.0}
    mean_gap = rest["training/rollout_probs_diff_mean"]
    unbiased = means["count"] / max(means["count"] - 1, 1.0)
    rest[_VALID] = 1.0
    rest["training/rollout_probs_diff_std"] = math.sqrt(max(means["gap_sq"] - mean_gap**2, 0.0) * unbiased)
    spread = math.sqrt(max(means["xx"] - means["x"] ** 2, 0.0) * max(means["yy"] - means["y"] ** 2, 0.0))
    if spread > 0:
        correlation = (means["xy"] - means["x"] * means["y"]) / spread
        rest["training/rollout_actor_probs_pearson_corr"] = min(max(correlation, -1.0), 1.0)
    return rest
