"""What the task runner builds."""

import pytest
from omegaconf import OmegaConf

from verl.single_controller.base.megatron import MegatronWorker
from verl.trainer.main_ppo import TaskRunner


@pytest.mark.parametrize("strategy", ["fsdp", "fsdp2", "megatron"])
def test_workers_on_megatron_report_their_place(strategy):
    node = {"strategy": strategy, "enable": True, "enable_resource_pool": False}
    algorithm = {"adv_estimator": "gae"}
    nodes = {"actor_rollout_ref": {"actor": node}, "critic": node, "reward_model": node, "algorithm": algorithm}
    config = OmegaConf.create(nodes)
    runner = TaskRunner()
    actor, _ = runner.add_actor_rollout_worker(config)
    runner.add_critic_worker(config)
    runner.add_reward_model_worker(config)
    made = [actor, *(cls.__ray_metadata__.modified_class for cls in runner.role_worker_mapping.values())]
    assert [issubclass(cls, MegatronWorker) for cls in made] == [strategy == "megatron"] * 4
