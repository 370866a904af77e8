"""Path of the reward managers in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.experimental.reward_loop")
