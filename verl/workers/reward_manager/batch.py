"""Import path of ``BatchRewardManager`` in the established verl interface."""

from verl.workers.rewards.managers import BatchRewardManager as BatchRewardManager
