"""Established path of ``MegatronRewardModel``."""

from verl.compat.workerless import MegatronRewardModel as MegatronRewardModel
