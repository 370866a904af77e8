"""Import path of ``MegatronPPOCritic`` in the established verl interface."""

from verl.compat.workerless import MegatronPPOCritic

__all__ = ["MegatronPPOCritic"]
