"""Established path of ``MegatronPPOActor``."""

from verl.workers.roles.given_modules import MegatronPPOActor

__all__ = ["MegatronPPOActor"]
