"""PPO one step off policy: ``python -m recipe.one_step_off_policy.main_ppo key=value ...``.

The launching process imports neither torch nor transformers, so the trainer is imported where it runs.
"""

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from verl.base_config import Violation
from verl.trainer.config.async_training import ONE_STEP_OFF, SYNC
from verl.trainer.config.cli import hydra_main
from verl.trainer.config.rules.asynchronous import refuse_two_numbers
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils.import_utils import dotted_name

if TYPE_CHECKING:
    from verl.trainer.config.run_config import RunConfig


def one_step_off_rules(run: "RunConfig") -> Iterator[Violation]:
    """Yield another mode than that of the recipe."""
    mode = run.async_training.mode
    if mode != ONE_STEP_OFF:
        expected = f"must be {ONE_STEP_OFF} in this recipe; verl.trainer.main_ppo takes the others"
        yield Violation("async_training.mode", mode, expected)


class OneStepOffTaskRunner(TaskRunner):
    """Runs the trainer that requests each batch a step ahead, with the workers and the data of the main trainer."""

    modes = (ONE_STEP_OFF,)
    recipe_rules = staticmethod(one_step_off_rules)

    def trainer_class(self) -> type:
        """Choose the trainer that is one step off policy."""
        from .ray_trainer import OneStepOffRayTrainer

        return OneStepOffRayTrainer


@hydra_main("one_step_off_ppo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Train with the composed configuration."""
    refuse_two_numbers(config, Path(__file__).parent / "config" / "one_step_off.yaml")
    if config.async_training.mode == SYNC:  # a configuration of the user's that does not say it
        config.async_training.mode = ONE_STEP_OFF
    run_ppo(config, OneStepOffTaskRunner)


if __name__ == "__main__":
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module(dotted_name(__file__)).main()
