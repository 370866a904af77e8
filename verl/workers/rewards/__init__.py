"""Rewards: managers that score responses, the loading and checking of scorers, judges."""

from verl.workers.rewards.abstract import AbstractRewardManager
from verl.workers.rewards.batch import BatchRewardManager
from verl.workers.rewards.dapo import DAPORewardManager
from verl.workers.rewards.naive import NaiveRewardManager
from verl.workers.rewards.prime import PrimeRewardManager
from verl.workers.rewards.registry import get_reward_manager_cls, register

__all__ = [
    "AbstractRewardManager",
    "BatchRewardManager",
    "DAPORewardManager",
    "NaiveRewardManager",
    "PrimeRewardManager",
    "get_reward_manager_cls",
    "register",
]
