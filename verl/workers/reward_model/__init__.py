"""Established names of the reward model around a module that the caller has built."""

from verl.workers.roles.given_modules import BasePPORewardModel as BasePPORewardModel
