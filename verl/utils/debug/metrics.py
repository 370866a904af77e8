"""Import path of the established verl interface for ``verl.algos.mismatch.calculate_debug_metrics``."""

from verl.algos.mismatch import calculate_debug_metrics

__all__ = ["calculate_debug_metrics"]
