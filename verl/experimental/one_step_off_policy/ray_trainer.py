"""Path of the recipe's trainer in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.experimental.one_step_off_policy.ray_trainer")
