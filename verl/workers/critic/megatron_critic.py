"""Established path of ``MegatronPPOCritic``."""

from verl.workers.roles.given_modules import MegatronPPOCritic

__all__ = ["MegatronPPOCritic"]
