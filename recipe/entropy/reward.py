"""Established import path of the function that loads reward managers, see ``verl.trainer.ppo.reward``."""

from verl.trainer.ppo.reward import load_reward_manager as load_reward_manager
