"""Established path of ``MegatronPPOActor``."""

from verl.workers.roles.workerless import MegatronPPOActor

__all__ = ["MegatronPPOActor"]
