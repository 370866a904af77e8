"""Established path of ``MegatronRewardModel``."""

from verl.workers.roles.megatron_modules import MegatronRewardModel

__all__ = ["MegatronRewardModel"]
