"""Path of the recipe's command in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.experimental.fully_async_policy.fully_async_main")

if __name__ == "__main__":
    __getattr__("main")()
