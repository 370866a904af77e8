"""Import path of the reward managers of ``verl.workers.rewards`` in the established verl interface."""

from verl.workers.rewards.managers import AbstractRewardManager as AbstractRewardManager
from verl.workers.rewards.managers import BatchRewardManager as BatchRewardManager
from verl.workers.rewards.managers import DAPORewardManager as DAPORewardManager
from verl.workers.rewards.managers import NaiveRewardManager as NaiveRewardManager
from verl.workers.rewards.managers import PrimeRewardManager as PrimeRewardManager
from verl.workers.rewards.managers import get_reward_manager_cls as get_reward_manager_cls
from verl.workers.rewards.managers import register as register
