"""Import path of ``MegatronPPOActor`` in the established verl interface."""

from verl.compat.workerless import MegatronPPOActor

__all__ = ["MegatronPPOActor"]
