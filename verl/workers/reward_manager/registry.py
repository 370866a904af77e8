"""Import path of the registry of reward managers in the established verl interface."""

from verl.workers.rewards.managers import REWARD_MANAGER_REGISTRY as REWARD_MANAGER_REGISTRY
from verl.workers.rewards.managers import get_reward_manager_cls as get_reward_manager_cls
from verl.workers.rewards.managers import register as register
