"""PPO on two halves of the devices, from the root of the repository:
``python3 -m examples.split_placement.main_ppo_split key=value ...``.

Actor, rollout and reference policy run on one half; critic and reward model run on the other. Actor and critic update
at the same time. The launching process imports neither torch nor transformers, so the workers are imported where they
run.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

if __package__ in (None, ""):  # started as a file: sys.path has the folder of this file, but not the repository
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from verl.errors import WrongInput
from verl.trainer.config.cli import hydra_main
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.utils import Role, need_critic
from verl.trainer.run.refusal import checked

if TYPE_CHECKING:
    from verl.single_controller.ray import RayWorkerGroup
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer
    from verl.trainer.ppo.resources import ResourcePoolManager

ACTOR_POOL = "actor_rollout_ref_pool"
CRITIC_POOL = "critic_pool"


def halves(num_nodes: int, devices_per_node: int) -> list[int]:
    """Return the number of processes on each node of a half: half of the nodes if possible, else half of each node.

    Raises: WrongInput when the devices cannot be halved.
    """
    if num_nodes % 2 == 0:
        return [devices_per_node] * (num_nodes // 2)
    if devices_per_node % 2 == 0:
        return [devices_per_node // 2] * num_nodes
    raise WrongInput(
        f"trainer.n_gpus_per_node={devices_per_node} and trainer.nnodes={num_nodes}: cannot be halved: write an even "
        "number for one of them"
    )


def check_placement(config: DictConfig) -> None:
    """Check the requirements of this placement, beyond those of the main trainer.

    Raises: WrongInput naming the key.
    """
    halves(config.trainer.nnodes, config.trainer.n_gpus_per_node)
    if not need_critic(config):
        raise WrongInput(f"algorithm.adv_estimator={config.algorithm.adv_estimator}: trains no critic: write gae")
    if config.actor_rollout_ref.actor.strategy == "megatron":
        raise WrongInput("actor_rollout_ref.actor.strategy=megatron: this example has workers for fsdp and fsdp2")
    if config.reward_model.enable and config.reward_model.enable_resource_pool:
        raise WrongInput(
            "reward_model.enable_resource_pool=true: the reward model shares the half of the critic: write false"
        )


class SplitTaskRunner(TaskRunner):
    """Runs the main trainer's roles on two resource pools."""

    def add_actor_rollout_worker(self, config: DictConfig) -> tuple[type, type["RayWorkerGroup"]]:
        """Choose the actor worker whose update returns a future to the driver at once."""
        from examples.split_placement.split_workers import SplitActorRolloutRefWorker
        from verl.single_controller.ray import RayWorkerGroup

        self._add(Role.ActorRollout, SplitActorRolloutRefWorker, ACTOR_POOL)
        return SplitActorRolloutRefWorker, RayWorkerGroup

    def add_critic_worker(self, config: DictConfig) -> None:
        """Choose the critic worker whose update returns a future to the driver at once."""
        super().add_critic_worker(config)
        if Role.Critic in self.mapping:
            from examples.split_placement.split_workers import SplitCriticWorker

            self._add(Role.Critic, SplitCriticWorker, CRITIC_POOL)

    def add_reward_model_worker(self, config: DictConfig) -> None:
        """Place the reward model on the critic's half."""
        super().add_reward_model_worker(config)
        if Role.RewardModel in self.mapping:
            self.mapping[Role.RewardModel] = CRITIC_POOL

    def add_ref_policy_worker(self, config: DictConfig, ref_policy_cls: type) -> None:
        """Place the reference policy on the actor's half."""
        super().add_ref_policy_worker(config, ref_policy_cls)
        if Role.RefPolicy in self.mapping:
            self.mapping[Role.RefPolicy] = ACTOR_POOL

    def init_resource_pool_mgr(self, config: DictConfig) -> "ResourcePoolManager":
        """Create the manager of the two resource pools."""
        from verl.trainer.ppo.resources import ResourcePoolManager

        half = halves(config.trainer.nnodes, config.trainer.n_gpus_per_node)
        spec = {ACTOR_POOL: half, CRITIC_POOL: half}
        return ResourcePoolManager(resource_pool_spec=spec, mapping=self.mapping, device_name=config.trainer.device)

    def trainer_class(self) -> type["RayPPOTrainer"]:
        """Choose the trainer that updates actor and critic at the same time."""
        from examples.split_placement.split_trainer import RaySplitTrainer

        return RaySplitTrainer


@hydra_main("ppo_trainer_split", config_path="config")
def main(config: DictConfig) -> None:
    """Run PPO on two halves with the composed configuration."""
    checked(lambda: check_placement(config))
    run_ppo(config, SplitTaskRunner)


if __name__ == "__main__":
    # Import the class by its module's name: a class of __main__ would be pickled by value into the Ray actor.
    importlib.import_module("examples.split_placement.main_ppo_split").main()
