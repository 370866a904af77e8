"""Established path of the reward managers of ``verl.workers.rewards``."""

from verl.workers.rewards.abstract import AbstractRewardManager, get_reward_manager_cls, register
from verl.workers.rewards.batch import BatchRewardManager
from verl.workers.rewards.dapo import DAPORewardManager
from verl.workers.rewards.naive import NaiveRewardManager
from verl.workers.rewards.prime import PrimeRewardManager

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "get_reward_manager_cls",
    "register",
]
