"""PPO one step off policy: ``python -m recipe.one_step_off_policy.main_ppo key=value ...``.

The launching process imports neither torch nor transformers, so the trainer is imported where it runs.
"""

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from verl.base_config import Violation
from verl.trainer.config.cli import hydra_main
from verl.trainer.config.rules.asynchronous import refuse_two_numbers
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils.import_utils import dotted_name

if TYPE_CHECKING:
    from verl.trainer.config.run_config import RunConfig

_ROLE = "actor_rollout_ref"


def one_step_off_rules(run: "RunConfig") -> Iterator[Violation]:
    """Yield settings under which the next batch cannot be generated while the present one trains."""
    shared = run.actor_rollout_ref
    if shared.hybrid_engine:
        expected = "must be false: generation and training overlap, so the servers need separate devices: "
        expected += f"write false, and {_ROLE}.rollout.nnodes and n_gpus_per_node; verl.trainer.main_ppo takes true"
        yield Violation(f"{_ROLE}.hybrid_engine", True, expected)
    elif not shared.rollout.serves:
        expected = "must be async: standalone servers answer request by request. Rows without agent_name get one "
        expected += "response each, as in a batch"
        yield Violation(f"{_ROLE}.rollout.mode", shared.rollout.mode, expected)
    if run.algorithm.adv_estimator == "remax":
        expected = "is not supported: its greedy baselines would come from other weights than the samples: write "
        expected += "another estimator such as rloo, or take verl.trainer.main_ppo"
        yield Violation.unsupported("algorithm.adv_estimator", "remax", expected)
    if shared.rollout.skip_rollout:
        expected = "is not supported: nothing is generated, so nothing overlaps: write false, or take "
        expected += "verl.trainer.main_ppo"
        yield Violation.unsupported(f"{_ROLE}.rollout.skip_rollout", True, expected)


class OneStepOffTaskRunner(TaskRunner):
    """Runs the trainer that requests each batch a step ahead, with the workers and the data of the main trainer."""

    recipe_rules = staticmethod(one_step_off_rules)

    def trainer_class(self) -> type:
        """Choose the trainer that is one step off policy."""
        from .ray_trainer import OneStepOffRayTrainer

        return OneStepOffRayTrainer


@hydra_main("one_step_off_ppo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Train with the composed configuration."""
    refuse_two_numbers(config)
    run_ppo(config, OneStepOffTaskRunner)


if __name__ == "__main__":
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module(dotted_name(__file__)).main()
