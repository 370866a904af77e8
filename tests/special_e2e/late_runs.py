"""Tries the wrong inputs that only a run can find, all in one launch.

``python -m tests.special_e2e.late_runs CASES.json key=value ...``; the file holds ``{id: words of the command}``, and
``messages.json`` next to it gets the exit code and the message that each ends with.
"""

import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from verl.trainer.config.cli import CONFIG_DIR, hydra_main
from verl.trainer.config.overrides import fitted_overrides
from verl.trainer.main_ppo import TaskRunner, run_ppo

CASES_VARIABLE = "LATE_RUNS"


class ManyRuns(TaskRunner):
    """Runs one command after another, each to its failure."""

    def run(self, config: DictConfig) -> None:
        """Try every case; those of an early group have workers of their own, the others share one trainer."""
        from verl.single_controller.ray import RayWorkerGroup
        from verl.trainer.ppo import resources

        # A run that ends while it reads its data would leave workers behind that come later.
        resources.take_steps_later = lambda classes: False
        path = Path(os.environ[CASES_VARIABLE])
        cases, self.messages = json.loads(path.read_text()), path.with_name("messages.json")
        self.said: dict[str, tuple[int, str]] = {}
        for name, words in cases["alone"].items():
            changed = compose(words)
            self.attempt(name, changed, lambda changed=changed: TaskRunner().run(changed))
            remove_placements()
        self.add_actor_rollout_worker(config)
        pools = self.init_resource_pool_mgr(config)
        trainer = self._build_trainer(config, pools, RayWorkerGroup)
        trainer.init_workers()
        for name, words in cases["together"].items():
            changed = compose(words)
            self.attempt(name, changed, lambda changed=changed: refit(trainer, changed))

    def attempt(self, name: str, config: DictConfig, act: Callable[[], None]) -> None:
        """Note the exit code and the message of an attempt, as the terminal would show them."""
        from verl.base_config import WrongInput
        from verl.trainer.preflight import check_inputs
        from verl.trainer.run.launch import report_failure, root_cause
        from verl.trainer.run.resume import run_folder

        check_inputs(config)  # what could have been found before Ray started would be no late case
        try:
            act()
            self.said[name] = 0, "did not fail"
        except Exception as error:  # what it is, is the question
            code = 2 if isinstance(root_cause(error), WrongInput) else 1
            self.said[name] = code, report_failure(error, run_folder(config))
        self.messages.write_text(json.dumps(self.said, indent=1))


def remove_placements() -> None:
    """Give back what a run has reserved, as the end of its process would."""
    from ray.util.placement_group import get_placement_group, placement_group_table, remove_placement_group

    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            remove_placement_group(get_placement_group(group["name"]))


def compose(words: list[str]) -> DictConfig:
    """Return the configuration of a command."""
    import hydra

    fitted = fitted_overrides(words, "ppo_trainer", CONFIG_DIR)
    with hydra.initialize_config_dir(CONFIG_DIR, version_base=None):
        return hydra.compose("ppo_trainer", fitted)


def refit(trainer: Any, config: DictConfig) -> None:
    """Train by another configuration on workers that are there already."""
    from verl.trainer.config.run_config import RunConfig
    from verl.trainer.ppo.reward import load_reward_manager

    trainer.config = config
    trainer.run_config = RunConfig.parse(config)
    trainer.global_steps = 0
    trainer._create_dataloader(None, None, None, None)
    trainer.reward_fn = load_reward_manager(config, trainer.tokenizer, num_examine=0)
    trainer.fit()


@hydra_main("ppo_trainer")
def main(config: DictConfig) -> None:
    """Run all cases."""
    run_ppo(config, ManyRuns)


if __name__ == "__main__":
    os.environ[CASES_VARIABLE] = sys.argv.pop(1)
    importlib.import_module("tests.special_e2e.late_runs").main()
