"""Path of ``verl.trainer.sft_trainer`` in later versions. ``verl.compat.facades`` lists its names."""

from verl.compat import facade

__getattr__ = facade("verl.trainer.sft_trainer_ray")

if __name__ == "__main__":
    from verl.utils.distributed import run_and_leave

    run_and_leave(__getattr__("main"))
