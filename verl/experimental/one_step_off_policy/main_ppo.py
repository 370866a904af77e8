"""Path of the recipe's command in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.experimental.one_step_off_policy.main_ppo")

if __name__ == "__main__":
    __getattr__("main")()
