"""The figures of ``verl.utils.debug.metrics`` where the driver cannot make them.

In a single on-policy update the old log-probabilities never reach the driver; their sums are made beside the loss, and
put together afterwards.
"""

from collections.abc import Mapping

from torch import Tensor

from verl.algos.aggregate import Extreme, Metric, Sum
from verl.utils.debug.metrics import GAP_MAXIMA, gap_metrics, gap_sums

_SUMS = "training/rollout_sums/"


def mismatch_metrics(log_probs: Tensor, rollout_log_probs: Tensor, mask: Tensor) -> dict[str, Metric]:
    """Return the sums over a micro-batch from which ``finish_mismatch`` makes the metrics. Tensors are (b, R)."""
    return {
        _SUMS + name: Extreme(value, "max") if name in GAP_MAXIMA else Sum(value, "constant")
        for name, value in gap_sums(log_probs, rollout_log_probs, mask).items()
    }


def finish_mismatch(metrics: Mapping[str, float]) -> dict[str, float]:
    """Replace the sums by the metrics that they make; other metrics pass through."""
    sums = {name.removeprefix(_SUMS): value for name, value in metrics.items() if name.startswith(_SUMS)}
    rest = {name: value for name, value in metrics.items() if not name.startswith(_SUMS)}
    return rest | gap_metrics(sums) if sums else rest
