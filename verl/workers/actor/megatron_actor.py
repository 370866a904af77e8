"""Established path of ``MegatronPPOActor``."""

from verl.workers.roles.megatron_modules import MegatronPPOActor

__all__ = ["MegatronPPOActor"]
