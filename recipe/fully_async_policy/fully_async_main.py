"""Fully asynchronous PPO: ``python -m recipe.fully_async_policy.fully_async_main key=value ...``."""

import importlib
from pathlib import Path

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.config.rules.asynchronous import refuse_two_numbers
from verl.trainer.main_ppo import FullyAsyncTaskRunner as FullyAsyncTaskRunner
from verl.trainer.main_ppo import run_async
from verl.utils.import_utils import dotted_name


@hydra_main("fully_async_ppo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Train by the composed configuration."""
    refuse_two_numbers(config, Path(__file__).parent / "config" / "fully_async.yaml")
    run_async(config)


if __name__ == "__main__":
    # Under its own name, so that modules of this package are not imported twice.
    importlib.import_module(dotted_name(__file__)).main()
