"""Established names of the critic around a module that the caller has built."""

from verl.workers.roles.given_modules import BasePPOCritic, DataParallelPPOCritic

__all__ = ["BasePPOCritic", "DataParallelPPOCritic"]
