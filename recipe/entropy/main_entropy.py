"""Entropy control by covariance: ``python -m recipe.entropy.main_entropy key=value ...``.

The launching process imports neither torch nor transformers, so the trainer is imported where it runs.
"""

import importlib

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils.import_utils import dotted_name, lazy_exports

_FACTORY = "verl.utils.dataset.factory"
__getattr__ = lazy_exports(__name__, {"create_rl_dataset": _FACTORY, "create_rl_sampler": _FACTORY})  # they need torch


class EntropyTaskRunner(TaskRunner):
    """The main trainer's workers and data, with the trainer that reports covariances."""

    recipe_nodes = ("algorithm.filter_groups",)

    def trainer_class(self) -> type:
        """Choose the trainer with dynamic sampling and covariances."""
        from .entropy_ray_trainer import RayEntropyTrainer

        return RayEntropyTrainer


@hydra_main("entropy_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Train by the composed configuration."""
    run_ppo(config, EntropyTaskRunner)


if __name__ == "__main__":
    # Under its own name, so that Ray imports EntropyTaskRunner in the actor instead of copying it there by value.
    importlib.import_module(dotted_name(__file__)).main()
