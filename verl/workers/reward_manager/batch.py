"""Established path of ``BatchRewardManager``."""

from verl.workers.rewards.managers import BatchRewardManager as BatchRewardManager
