"""DAPO: ``python -m recipe.dapo.main_dapo key=value ...``.

The launching process imports neither torch nor transformers, so the trainer is imported where it runs.
"""

import importlib

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils.import_utils import dotted_name


class DAPOTaskRunner(TaskRunner):
    """Runs DAPO's trainer with the workers and the data of the main trainer."""

    recipe_nodes = ("algorithm.filter_groups",)

    def trainer_class(self) -> type:
        """Choose the trainer with dynamic sampling."""
        from .dapo_ray_trainer import RayDAPOTrainer

        return RayDAPOTrainer


@hydra_main("dapo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Run DAPO by the composed configuration."""
    run_ppo(config, DAPOTaskRunner)


if __name__ == "__main__":
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module(dotted_name(__file__)).main()
