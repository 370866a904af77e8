"""Fully asynchronous PPO: ``python -m recipe.fully_async_policy.fully_async_main key=value ...``."""

import importlib

from omegaconf import DictConfig

from verl.trainer.asynchronous.task_runner import FullyAsyncTaskRunner, complete
from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import run_ppo
from verl.utils.import_utils import dotted_name


@hydra_main("fully_async_ppo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Train by the composed configuration."""
    complete(config)
    run_ppo(config, FullyAsyncTaskRunner)


if __name__ == "__main__":
    # Under its own name, so that modules of this package are not imported twice.
    importlib.import_module(dotted_name(__file__)).main()
