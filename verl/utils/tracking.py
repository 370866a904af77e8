"""Established import path of ``verl.utils.observe.tracking``."""

from verl.utils.observe.generations import ValidationGenerationsLogger
from verl.utils.observe.tracking import Tracking

__all__ = ["Tracking", "ValidationGenerationsLogger"]
