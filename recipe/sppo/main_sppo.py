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
    """The main trainer's data and reward, with SPPO's worker and trainer."""

    def add_actor_rollout_worker(self, config: DictConfig) -> tuple[type, type["RayWorkerGroup"]]:
        """Choose the worker that knows the loss."""
        from verl.single_controller.ray import RayWorkerGroup

        from .sppo_worker import SPPOActorRolloutRefWorker

        self._add(Role.ActorRollout, SPPOActorRolloutRefWorker)
        return SPPOActorRolloutRefWorker, RayWorkerGroup

    def trainer_class(self) -> type:
        """Choose the trainer with the soft mean."""
        from .sppo_ray_trainer import RaySPPOTrainer

        return RaySPPOTrainer


@hydra_main("sppo_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Run SPPO by the composed configuration."""
    run_ppo(config, SPPOTaskRunner)


if __name__ == "__main__":
    # Under its own name, so that Ray imports SPPOTaskRunner in the actor instead of copying it there by value.
    importlib.import_module(dotted_name(__file__)).main()
