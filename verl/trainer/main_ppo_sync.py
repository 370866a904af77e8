"""Path of ``verl.trainer.main_ppo`` in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.trainer.main_ppo_sync")

if __name__ == "__main__":
    __getattr__("main")()
