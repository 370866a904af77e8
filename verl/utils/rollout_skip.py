"""Import path of the established verl interface for ``verl.trainer.ppo.rollout_skip``."""

from verl.trainer.ppo.rollout_skip import DataProto, RolloutSkip

__all__ = ["DataProto", "RolloutSkip"]
