"""Import path of ``DAPORewardManager`` in the established verl interface."""

from verl.workers.rewards.managers import DAPORewardManager as DAPORewardManager
