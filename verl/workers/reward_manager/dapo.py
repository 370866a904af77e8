"""Established path of ``DAPORewardManager``."""

from verl.workers.rewards.managers import DAPORewardManager as DAPORewardManager
