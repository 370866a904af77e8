"""Names of the established verl interface for the reward model around a module that the caller has built."""

from verl.compat.workerless import BasePPORewardModel as BasePPORewardModel
