"""Path of the reuse of rollouts in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.utils.skip")
