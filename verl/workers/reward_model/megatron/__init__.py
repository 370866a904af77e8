"""Import path of ``MegatronRewardModel`` in the established verl interface."""

from verl.compat.workerless import MegatronRewardModel as MegatronRewardModel
