"""Established path of ``DataParallelPPOCritic``."""

from verl.compat.workerless import DataParallelPPOCritic

__all__ = ["DataParallelPPOCritic"]
