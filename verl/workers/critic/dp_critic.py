"""Established path of ``DataParallelPPOCritic``."""

from verl.workers.roles.workerless import DataParallelPPOCritic

__all__ = ["DataParallelPPOCritic"]
