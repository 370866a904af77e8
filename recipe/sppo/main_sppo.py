"""SPPO: ``python -m recipe.sppo.main_sppo key=value ...``.

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


class SPPOTaskRunner(TaskRunner):
    """Runs SPPO's trainer and worker, with the data and the reward of the main trainer."""

    def add_actor_rollout_worker(self, config: DictConfig) -> tuple[type, type["RayWorkerGroup"]]:
        """Choose the worker that registers the loss."""
        from verl.single_controller.ray import RayWorkerGroup

        from .sppo_worker import SPPOActorRolloutRefWorker

        self._add(Role.ActorRollout, SPPOActorRolloutRefWorker)
        return SPPOActorRolloutRefWorker, RayWorkerGroup

    def trainer_class(self) -> type:
        """Choose the trainer that uses the soft mean."""
        from .sppo_ray_trainer import RaySPPOTrainer

        return RaySPPOTrainer


@hydra_main("sppo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Run SPPO by the composed configuration."""
    run_ppo(config, SPPOTaskRunner)


if __name__ == "__main__":
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module(dotted_name(__file__)).main()
