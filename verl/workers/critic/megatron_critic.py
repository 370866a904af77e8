"""Established path of ``MegatronPPOCritic``."""

from verl.workers.roles.workerless import MegatronPPOCritic

__all__ = ["MegatronPPOCritic"]
