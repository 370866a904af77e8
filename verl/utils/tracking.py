"""Import path of the established verl interface for ``verl.utils.observe.tracking``."""

from verl.utils.observe.tracking import Tracking, ValidationGenerationsLogger

__all__ = ["Tracking", "ValidationGenerationsLogger"]
