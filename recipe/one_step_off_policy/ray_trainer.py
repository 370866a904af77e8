"""The trainer of the recipe, which a copy of the recipe may change."""

from verl.trainer.asynchronous.trainer import AsyncTrainer


class OneStepOffRayTrainer(AsyncTrainer):
    """PPO whose servers generate the batch of the next step while the present batch trains.

    At the start of step k the servers have just finished batch k. They get the weights of step k - 1 and begin with
    batch k + 1. So batches 1 and 2 are sampled with the initial weights, and batch k with the weights of step k - 2.
    """
