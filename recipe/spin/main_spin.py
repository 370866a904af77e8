"""SPIN: ``python -m recipe.spin.main_spin key=value ...``.

The launching process imports neither torch nor transformers, so trainer and worker are imported where they run.
"""

import importlib
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.utils import Role
from verl.utils.import_utils import dotted_name

if TYPE_CHECKING:
    from verl.single_controller.ray import RayWorkerGroup


class SPINTaskRunner(TaskRunner):
    """Runs SPIN's trainer and worker, with the data and the reward of the main trainer."""

    def add_actor_rollout_worker(self, config: DictConfig) -> tuple[type, type["RayWorkerGroup"]]:
        """Choose the worker that trains on pairs and holds the reference."""
        from verl.single_controller.ray import RayWorkerGroup

        from .fsdp_workers import SPINRolloutRefWorker

        self._add(Role.ActorRollout, SPINRolloutRefWorker)
        return SPINRolloutRefWorker, RayWorkerGroup

    def add_ref_policy_worker(self, config: DictConfig, ref_policy_cls: type) -> None:
        """Choose the worker of the reference, which the loss always reads."""
        self._add(Role.RefPolicy, ref_policy_cls)

    def trainer_class(self) -> type:
        """Choose the trainer with preferences."""
        from .spin_trainer import RaySPINTrainer

        return RaySPINTrainer


@hydra_main("spin_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Run SPIN by the composed configuration."""
    run_ppo(config, SPINTaskRunner)


if __name__ == "__main__":
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module(dotted_name(__file__)).main()
