"""DAPO: ``python -m recipe.dapo.main_dapo key=value ...``.

The launching process imports neither torch nor transformers, so the trainer is imported where it runs.
"""

import importlib

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils.import_utils import dotted_name


class DAPOTaskRunner(TaskRunner):
    """The main trainer's workers and data, with DAPO's trainer."""

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
    # Under its own name, so that Ray imports DAPOTaskRunner in the actor instead of copying it there by value.
    importlib.import_module(dotted_name(__file__)).main()
