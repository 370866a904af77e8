"""Path of the ways of the weights in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.checkpoint_engine")
