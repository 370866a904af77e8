"""Path of the importance weights in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.trainer.ppo.rollout_corr_helper")
