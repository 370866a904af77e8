"""Established names of the critic around a module that the caller has built."""

from verl.workers.roles.workerless import BasePPOCritic, DataParallelPPOCritic

__all__ = ["BasePPOCritic", "DataParallelPPOCritic"]
