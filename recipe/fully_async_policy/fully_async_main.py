"""Fully asynchronous PPO: ``python -m recipe.fully_async_policy.fully_async_main key=value ...``.

The launching process imports neither torch nor transformers, so the trainer is imported where it runs.
"""

import importlib
from collections.abc import Iterator
from typing import TYPE_CHECKING

from omegaconf import DictConfig, OmegaConf, open_dict

from verl.base_config import Violation
from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils.import_utils import dotted_name

if TYPE_CHECKING:
    from verl.trainer.config.run_config import RunConfig

_ROLE = "actor_rollout_ref"


def fully_async_rules(run: "RunConfig") -> Iterator[Violation]:
    """Yield settings that forbid generating while the trainer trains."""
    shared = run.actor_rollout_ref
    wanted = shared.actor.ppo_mini_batch_size * run.async_training.require_batches
    if run.data.train_batch_size != wanted:
        expected = f"must be 0, or {_ROLE}.actor.ppo_mini_batch_size x async_training.require_batches = {wanted}"
        yield Violation("data.train_batch_size", run.data.train_batch_size, expected)
    if run.data.gen_batch_size != 1:
        yield Violation("data.gen_batch_size", run.data.gen_batch_size, "must be 1: prompts are sent one by one")
    if shared.hybrid_engine:
        expected = "must be false: generation and training overlap, so that the servers need devices of their own: "
        expected += f"write false, and {_ROLE}.rollout.nnodes and n_gpus_per_node; verl.trainer.main_ppo takes true"
        yield Violation(f"{_ROLE}.hybrid_engine", True, expected)
    elif not shared.rollout.serves:
        expected = "must be async: standalone servers answer request by request"
        yield Violation(f"{_ROLE}.rollout.mode", shared.rollout.mode, expected)
    if not shared.rollout.calculate_log_probs:
        expected = "must be true: the loss compares with the weights that sampled"
        yield Violation(f"{_ROLE}.rollout.calculate_log_probs", False, expected)
    if run.algorithm.adv_estimator == "remax":
        expected = "is not supported: its greedy baselines would be those of other weights than the samples: write "
        expected += "another estimator such as rloo, or take verl.trainer.main_ppo"
        yield Violation.unsupported("algorithm.adv_estimator", "remax", expected)
    if shared.rollout.over_sample_rate:
        expected = "is not supported: an update does not wait for the slowest responses anyway: write 0"
        yield Violation.unsupported(f"{_ROLE}.rollout.over_sample_rate", shared.rollout.over_sample_rate, expected)


def complete(config: DictConfig) -> None:
    """Fill in the keys of the main trainer that those of this recipe decide."""
    select = OmegaConf.select
    pace = config.async_training
    groups = select(config, f"{_ROLE}.actor.ppo_mini_batch_size") * pace.require_batches
    with open_dict(config):
        if not config.data.train_batch_size:
            config.data.train_batch_size = groups
        if config.trainer.total_training_steps is None and config.rollout.total_rollout_steps is not None:
            config.trainer.total_training_steps = max(1, config.rollout.total_rollout_steps // groups)
        config.trainer.total_epochs = min(config.trainer.total_epochs, config.rollout.total_epochs)
        if config.rollout.test_freq > 0:
            config.trainer.test_freq = config.rollout.test_freq * pace.trigger_parameter_sync_step


class FullyAsyncTaskRunner(TaskRunner):
    """The main trainer's workers and data, with a trainer that trains while the servers generate."""

    recipe_rules = staticmethod(fully_async_rules)

    def trainer_class(self) -> type:
        """Choose the asynchronous trainer."""
        from verl.trainer.asynchronous.trainer import AsyncTrainer

        return AsyncTrainer


@hydra_main("fully_async_ppo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Train by the composed configuration."""
    complete(config)
    run_ppo(config, FullyAsyncTaskRunner)


if __name__ == "__main__":
    # Under its own name, so that Ray imports FullyAsyncTaskRunner in the actor instead of copying it there by value.
    importlib.import_module(dotted_name(__file__)).main()
