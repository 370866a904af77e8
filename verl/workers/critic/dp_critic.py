"""Import path of ``DataParallelPPOCritic`` in the established verl interface."""

from verl.compat.workerless import DataParallelPPOCritic

__all__ = ["DataParallelPPOCritic"]
