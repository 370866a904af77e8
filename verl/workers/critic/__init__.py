"""Names of the established verl interface for the critic around a module that the caller has built."""

from verl.compat.workerless import BasePPOCritic, DataParallelPPOCritic

__all__ = ["BasePPOCritic", "DataParallelPPOCritic"]
