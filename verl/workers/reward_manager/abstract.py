"""Established path of ``AbstractRewardManager``."""

from verl.workers.rewards.abstract import AbstractRewardManager

__all__ = ["AbstractRewardManager"]
