"""Importance weights for a rollout whose engine is not quite the model that trains, once per batch, on the driver."""

from torch import Tensor

from verl.algos.rollout_is import WeightOptions, mismatch_metrics, scan_log_probs, weight_metrics
from verl.protocol import DataProto

__all__ = ["compute_is_metrics", "compute_mismatch_metrics", "compute_rollout_importance_weights"]

PREFIX = "mismatch/"


def compute_rollout_importance_weights(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float | None = None,
    rollout_is_threshold_lower: float | None = None,
    rollout_is_veto_threshold: float | None = 1e-4,
) -> tuple[DataProto | None, dict[str, float]]:
    """Weigh each token by how much likelier it is in training than in the rollout, within thresholds.

    Args: log-probabilities and mask are (B, T). ``token`` weighs each token by its own ratio, ``sequence`` by the
        product over its sequence, ``geometric`` by the product's geometric mean. ``truncate`` caps at the upper
        threshold; ``mask``, also spelled ``clip``, sets to zero what lies outside both. The lower threshold defaults
        to the reciprocal of the upper one. A sequence with a token whose ratio is below the veto threshold gets zero.
    Returns: a batch with ``rollout_is_weights`` (B, T), and metrics under ``mismatch/``; (None, {}) without threshold.
    Raises: ValueError for an unknown level or mode, thresholds that leave nothing between them, shapes that differ,
        and NaN inside the mask; where the mask keeps nothing, one that is also an AssertionError.
    """
    if rollout_is_threshold is None:
        return None, {}
    options = WeightOptions(
        rollout_is_level, rollout_is_mode, rollout_is_threshold, rollout_is_threshold_lower, rollout_is_veto_threshold
    )
    scan = scan_log_probs(old_log_prob, rollout_log_prob, response_mask, options)
    metrics = weight_metrics(scan, options) | mismatch_metrics(scan.columns)
    assert scan.weights is not None
    weights = DataProto.from_dict(tensors={"rollout_is_weights": scan.weights})
    return weights, {PREFIX + name: value for name, value in metrics.items()}


def compute_is_metrics(
    old_log_prob: Tensor,
    rollout_log_prob: Tensor,
    response_mask: Tensor,
    rollout_is_level: str = "token",
    rollout_is_mode: str = "truncate",
    rollout_is_threshold: float = 2.0,
    rollout_is_threshold_lower: float | None = None,
    rollout_is_veto_threshold: float | None = 1e-4,
) -> dict[str, float]:
    """Return the statistics of the importance weights, without prefix; arguments as above.

    Raises: ValueError as above.
    """
    options = WeightOptions(
        rollout_is_level, rollout_is_mode, rollout_is_threshold, rollout_is_threshold_lower, rollout_is_veto_threshold
    )
    return weight_metrics(scan_log_probs(old_log_prob, rollout_log_prob, response_mask, options), options)


def compute_mismatch_metrics(
    old_log_prob: Tensor, rollout_log_prob: Tensor | None, response_mask: Tensor
) -> dict[str, float]:
    """Return KL and perplexities of rollout and training, without prefix; those of training alone without a rollout.

    Raises: ValueError as above.
    """
    other = old_log_prob if rollout_log_prob is None else rollout_log_prob
    columns = scan_log_probs(old_log_prob, other, response_mask).columns
    return mismatch_metrics(columns, with_rollout=rollout_log_prob is not None)
