"""Established path of ``AbstractRewardManager``."""

from verl.workers.rewards.managers import AbstractRewardManager as AbstractRewardManager
