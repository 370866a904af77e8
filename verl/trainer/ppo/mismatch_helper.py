"""Import path of the established verl interface for the importance weights of ``verl.algos.mismatch``."""

from verl.algos.mismatch import compute_is_metrics, compute_mismatch_metrics, compute_rollout_importance_weights

__all__ = ["compute_is_metrics", "compute_mismatch_metrics", "compute_rollout_importance_weights"]
