"""The halves of split placement, and what it refuses before the start."""

from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from examples.split_placement import main_ppo_split
from verl.base_config import WrongInput
from verl.trainer.ppo.utils import Role

FOLDER = Path(main_ppo_split.__file__).parent


def config(*overrides: str) -> DictConfig:
    with initialize_config_dir(str(FOLDER / "config"), version_base=None):
        return compose("ppo_trainer_split", overrides=["algorithm.adv_estimator=gae", *overrides])


@pytest.mark.parametrize(
    ("nodes", "devices", "half"), [(1, 8, [4]), (1, 2, [1]), (2, 8, [8]), (4, 1, [1, 1]), (3, 2, [1, 1, 1])]
)
def test_halves(nodes, devices, half):
    assert main_ppo_split.halves(nodes, devices) == half
    assert 2 * sum(half) == nodes * devices


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.n_gpus_per_node=1"], "trainer.n_gpus_per_node=1 and trainer.nnodes=1: cannot be halved"),
        (["algorithm.adv_estimator=grpo"], "algorithm.adv_estimator=grpo: trains no critic"),
        (["actor_rollout_ref.actor.strategy=megatron"], "actor_rollout_ref.actor.strategy=megatron: "),
        (["reward_model.enable=true", "reward_model.enable_resource_pool=true"], "reward_model.enable_resource_pool"),
    ],
)
def test_refusals(overrides, message):
    with pytest.raises(WrongInput, match=message):
        main_ppo_split.check_placement(config(*overrides))
    main_ppo_split.check_placement(config())


def test_roles_of_the_halves():
    chosen = config("reward_model.enable=true", "actor_rollout_ref.actor.use_kl_loss=true")
    runner = main_ppo_split.SplitTaskRunner()
    worker, _ = runner.add_actor_rollout_worker(chosen)
    runner.add_critic_worker(chosen)
    runner.add_reward_model_worker(chosen)
    runner.add_ref_policy_worker(chosen, worker)
    assert runner.mapping == {
        Role.ActorRollout: main_ppo_split.ACTOR_POOL,
        Role.RefPolicy: main_ppo_split.ACTOR_POOL,
        Role.Critic: main_ppo_split.CRITIC_POOL,
        Role.RewardModel: main_ppo_split.CRITIC_POOL,
    }
    assert runner.init_resource_pool_mgr(chosen).get_n_gpus() == 8
