"""Established path of ``MegatronRewardModel``."""

from verl.workers.roles.given_modules import MegatronRewardModel as MegatronRewardModel
