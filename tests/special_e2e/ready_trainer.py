"""Runs on a CPU whose processes start as on a GPU: the trainer has imported before Ray runs, and nothing is forked.

``python -m tests.special_e2e.ready_trainer key=value ...``
"""

import importlib

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import run_ppo
from verl.trainer.run import prestart

_plan_of = prestart._plan_of


def as_on_a_gpu(config: DictConfig, has_own_runner: bool) -> "prestart._Plan | None":
    """Return the plan of a run on a GPU, with the variables of one on a CPU."""
    plan = _plan_of(config, has_own_runner)
    return plan and prestart._Plan("", plan.strategies, None, None, only_trainer=True)


@hydra_main("ppo_trainer")
def main(config: DictConfig) -> None:
    """Launch such a run."""
    prestart._plan_of = as_on_a_gpu
    run_ppo(config)


if __name__ == "__main__":
    importlib.import_module("tests.special_e2e.ready_trainer").main()
