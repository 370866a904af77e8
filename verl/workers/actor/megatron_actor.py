"""Established path of ``MegatronPPOActor``."""

from verl.compat.workerless import MegatronPPOActor

__all__ = ["MegatronPPOActor"]
