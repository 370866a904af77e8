"""Import path of ``AbstractRewardManager`` in the established verl interface."""

from verl.workers.rewards.managers import AbstractRewardManager as AbstractRewardManager
