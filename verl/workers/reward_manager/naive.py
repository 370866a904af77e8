"""Import path of ``NaiveRewardManager`` in the established verl interface."""

from verl.workers.rewards.managers import NaiveRewardManager as NaiveRewardManager
