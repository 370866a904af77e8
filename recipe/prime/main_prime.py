"""PRIME: ``python -m recipe.prime.main_prime key=value ...``.

The launching process imports neither torch nor transformers, so trainer and worker are imported where they run.
"""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig

from verl.errors import WrongInput
from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.utils import Role
from verl.utils.import_utils import dotted_name


class PRIMETaskRunner(TaskRunner):
    """Runs PRIME's trainer and reward model, with the policy and the data of the main trainer."""

    def add_reward_model_worker(self, config: DictConfig) -> None:
        """Choose the worker of the trained reward model, if one is enabled."""
        reward = config.reward_model
        if reward.enable:
            from .prime_fsdp_workers import PRIMERewardModelWorker

            pool = "reward_pool" if reward.enable_resource_pool else "global_pool"
            self._add(Role.RewardModel, PRIMERewardModelWorker, pool)

    def add_ref_policy_worker(self, config: DictConfig, ref_policy_cls: type) -> None:
        """Choose the worker of the reference policy if the loss has a KL term; the reward never has one."""
        config.algorithm.use_kl_in_reward = False
        super().add_ref_policy_worker(config, ref_policy_cls)

    def trainer_class(self) -> type:
        """Choose the trainer that trains the reward model and filters prompts."""
        from .prime_ray_trainer import RayPRIMETrainer

        return RayPRIMETrainer


def run_prime(config: DictConfig, compute_score: Callable[..., Any] | None = None) -> None:
    """Run PRIME with a composed configuration.

    Args: ``compute_score(data_source, solution_str, ground_truth, extra_info)`` replaces ``custom_reward_function``;
        it must be defined in a Python file.
    Raises: WrongInput for a function that is not at the top level of a file.
    """
    if compute_score is not None:
        config.custom_reward_function.path = _file_of(compute_score)
        config.custom_reward_function.name = compute_score.__name__
    run_ppo(config, PRIMETaskRunner)


def _file_of(function: Callable[..., Any]) -> str:
    """Return the file that defines a function; other processes load the function from this file."""
    file = inspect.getsourcefile(function) if inspect.isfunction(function) else None
    if file is None or function.__qualname__ != function.__name__ or not function.__name__.isidentifier():
        raise WrongInput(f"compute_score={function!r}: must be a function at the top level of a Python file")
    return file


@hydra_main("prime_trainer", config_path="config")
def main(config: DictConfig) -> None:
    """Run PRIME by the composed configuration."""
    run_prime(config)


if __name__ == "__main__":
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module(dotted_name(__file__)).main()
