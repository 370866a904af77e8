"""Established path of ``PrimeRewardManager``."""

from verl.workers.rewards.managers import PrimeRewardManager as PrimeRewardManager
