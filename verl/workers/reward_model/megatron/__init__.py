"""Established path of ``MegatronRewardModel``."""

from verl.workers.roles.workerless import MegatronRewardModel as MegatronRewardModel
