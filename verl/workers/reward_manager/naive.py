"""Established path of ``NaiveRewardManager``."""

from verl.workers.rewards.managers import NaiveRewardManager as NaiveRewardManager
