"""A fork whose trainer writes to the configuration: ``python -m tests.special_e2e.changing_trainer key=value ...``."""

import importlib
from typing import Any

from omegaconf import DictConfig

from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo

LEARNING_RATE = 5e-3


class ChangingTaskRunner(TaskRunner):
    """Has a trainer that sets the learning rate."""

    def trainer_class(self) -> Any:
        """Return it."""
        from verl.trainer.ppo.ray_trainer import RayPPOTrainer

        class ChangingTrainer(RayPPOTrainer):
            def __init__(self, config: DictConfig, *args: Any, **kwargs: Any) -> None:
                config.actor_rollout_ref.actor.optim.lr = LEARNING_RATE
                super().__init__(config, *args, **kwargs)

        return ChangingTrainer


@hydra_main("ppo_trainer")
def main(config: DictConfig) -> None:
    """Train with the changed learning rate."""
    run_ppo(config, ChangingTaskRunner)


if __name__ == "__main__":
    importlib.import_module("tests.special_e2e.changing_trainer").main()
