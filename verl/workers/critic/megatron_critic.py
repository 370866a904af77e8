"""Established path of ``MegatronPPOCritic``."""

from verl.compat.workerless import MegatronPPOCritic

__all__ = ["MegatronPPOCritic"]
