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
    """Runs the trainer that reports covariances, with the workers and the data of the main trainer."""

    recipe_nodes = ("algorithm.filter_groups",)

    def trainer_class(self) -> type:
        """Choose the trainer with dynamic sampling and covariances."""
        from .entropy_ray_trainer import RayEntropyTrainer

        return RayEntropyTrainer


@hydra_main("entropy_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Train with the composed configuration."""
    run_ppo(config, EntropyTaskRunner)


if __name__ == "__main__":
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module(dotted_name(__file__)).main()
