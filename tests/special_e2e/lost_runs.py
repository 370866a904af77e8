"""Runs whose trainer does nothing, so that the processes around it can be lost within seconds of a launch.

``python -m tests.special_e2e.lost_runs key=value ...``; the fault is the one of ``VERL_FAULT``.
"""

import importlib
import time

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo


class Waiting(TaskRunner):
    """Enters the phases of a step, and stays in the last one."""

    def run(self, config: DictConfig) -> None:
        """Wait for the fault; a trainer that is not hit would wait for ever."""
        from verl.single_controller.base.driver_phase import phase
        from verl.utils.observe.activity import noted_scorer

        with phase("update_actor", step=1):
            time.sleep(1)  # as in any run, the launching process knows this one when it dies
        with noted_scorer("compute_score of mine.py"), phase("reward", step=2):
            time.sleep(3600)


@hydra_main("ppo_trainer")
def main(config: DictConfig) -> None:
    """Launch such a run."""
    run_ppo(config, Waiting)


if __name__ == "__main__":
    importlib.import_module("tests.special_e2e.lost_runs").main()
