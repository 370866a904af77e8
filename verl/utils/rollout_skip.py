"""Established path of ``verl.trainer.ppo.rollout_skip``."""

from verl.protocol import DataProto
from verl.trainer.ppo.rollout_skip import RolloutSkip

__all__ = ["DataProto", "RolloutSkip"]
