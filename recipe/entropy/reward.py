"""Established import path of the loader of reward managers, see ``verl.trainer.ppo.reward``."""

from verl.trainer.ppo.reward import load_reward_manager as load_reward_manager
