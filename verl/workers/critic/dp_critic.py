"""Established path of ``DataParallelPPOCritic``."""

from verl.workers.roles.given_modules import DataParallelPPOCritic

__all__ = ["DataParallelPPOCritic"]
