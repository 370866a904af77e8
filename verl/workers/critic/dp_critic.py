"""Established path of ``DataParallelPPOCritic``."""

from verl.workers.roles.dp_critic import DataParallelPPOCritic

__all__ = ["DataParallelPPOCritic"]
