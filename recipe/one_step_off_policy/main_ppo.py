"""PPO one step off policy: ``python -m recipe.one_step_off_policy.main_ppo key=value ...``.

The launching process imports neither torch nor transformers, so the trainer is imported where it runs.
"""

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf

from verl.base_config import ConfigError, Violation
from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils.import_utils import dotted_name
from verl.workers.config import RolloutConfig

if TYPE_CHECKING:
    from verl.trainer.config.run_config import RunConfig

_ROLE = "actor_rollout_ref"


def one_step_off_rules(run: "RunConfig") -> Iterator[Violation]:
    """Yield settings that forbid generating the next batch while the present one trains."""
    shared = run.actor_rollout_ref
    if shared.hybrid_engine:
        expected = "must be false: generation and training overlap, so that the servers need devices of their own: "
        expected += f"write false, and {_ROLE}.rollout.nnodes and n_gpus_per_node; verl.trainer.main_ppo takes true"
        yield Violation(f"{_ROLE}.hybrid_engine", True, expected)
    elif not shared.rollout.serves:
        expected = "must be async: standalone servers answer request by request. Rows without agent_name get one "
        expected += "response each, as in a batch"
        yield Violation(f"{_ROLE}.rollout.mode", shared.rollout.mode, expected)
    if run.algorithm.adv_estimator == "remax":
        expected = "is not supported: its greedy baselines would be those of other weights than the samples: write "
        expected += "another estimator such as rloo, or take verl.trainer.main_ppo"
        yield Violation.unsupported("algorithm.adv_estimator", "remax", expected)
    if shared.rollout.skip_rollout:
        expected = "is not supported: nothing is generated, so nothing overlaps: write false, or take "
        expected += "verl.trainer.main_ppo"
        yield Violation.unsupported(f"{_ROLE}.rollout.skip_rollout", True, expected)


def refuse_two_numbers(config: DictConfig) -> None:
    """Refuse other devices of the servers in ``rollout`` than in ``actor_rollout_ref.rollout``.

    Raises: ConfigError.
    """
    violations = []
    for name in ("nnodes", "n_gpus_per_node"):
        short, whole = (OmegaConf.select(config, f"{node}.{name}") for node in ("rollout", f"{_ROLE}.rollout"))
        if short not in (None, getattr(RolloutConfig, name), whole):
            violations.append(
                Violation(
                    f"rollout.{name}", short, f"is the same as {_ROLE}.rollout.{name}={whole}: write one of the two"
                )
            )
    if violations:
        raise ConfigError(violations)


class OneStepOffTaskRunner(TaskRunner):
    """The main trainer's workers and data, with a trainer that requests each batch a step ahead."""

    recipe_rules = staticmethod(one_step_off_rules)

    def trainer_class(self) -> type:
        """Choose the trainer that is one step off policy."""
        from .ray_trainer import OneStepOffRayTrainer

        return OneStepOffRayTrainer


@hydra_main("one_step_off_ppo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Train by the composed configuration."""
    refuse_two_numbers(config)
    run_ppo(config, OneStepOffTaskRunner)


if __name__ == "__main__":
    # Under its own name, so that Ray imports OneStepOffTaskRunner in the actor instead of copying it there by value.
    importlib.import_module(dotted_name(__file__)).main()
