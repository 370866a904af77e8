"""Established path of ``MegatronPPOCritic``."""

from verl.workers.roles.megatron_modules import MegatronPPOCritic

__all__ = ["MegatronPPOCritic"]
