"""Path of the recipe fully_async_policy in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.experimental.fully_async_policy")
