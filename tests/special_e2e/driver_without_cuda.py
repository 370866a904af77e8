"""Runs whose driver sees a GPU and must not initialise CUDA, which would take memory that the workers have counted.

``python -m tests.special_e2e.driver_without_cuda key=value ...``
"""

import importlib
import logging

import torch
from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.utils import device

SAID = "the driver took its machine for one with a GPU"


def refuse_cuda() -> None:
    """Stand in for the initialisation of CUDA.

    Raises: AssertionError always.
    """
    raise AssertionError("the driver initialises CUDA")


def guard() -> None:
    """Let this process take its machine for one with a GPU that it must not touch."""
    device.is_cuda_available = True
    torch.cuda._lazy_init = refuse_cuda


class GuardedTaskRunner(TaskRunner):
    """Trains, without CUDA."""

    def run(self, config: DictConfig) -> None:
        """Train to the end."""
        guard()
        try:
            device.get_device_id()
        except AssertionError:
            logging.getLogger("verl").warning(SAID)
            super().run(config)


@hydra_main("ppo_trainer")
def main(config: DictConfig) -> None:
    """Launch such a run."""
    guard()
    run_ppo(config, GuardedTaskRunner)


if __name__ == "__main__":
    importlib.import_module("tests.special_e2e.driver_without_cuda").main()
