"""The weight sync in the loop: when the driver asks the workers for it."""

from types import SimpleNamespace

import pytest
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.state import RunState


class Group:
    """Workers that note the calls."""

    def __init__(self):
        self.calls = []

    def init_model(self):
        self.calls.append("init_model")

    def sync_weights(self, step):
        self.calls.append(("sync", step))

    def generate_sequences(self, requests):
        self.calls.append("generate")
        return requests

    def update_actor(self, batch):
        self.calls.append("update")
        return DataProto(meta_info={"metrics": {}})


@pytest.fixture
def trainer():
    made = RayPPOTrainer.__new__(RayPPOTrainer)
    made.config = OmegaConf.create({})
    made.run_config = RunConfig.parse(made.config)
    made.state = RunState(seed=1, step=1)
    made.use_critic = False
    made.actor_rollout_wg = Group()
    return made


def test_the_engine_is_synced_once_for_each_update(trainer):
    group = trainer.actor_rollout_wg
    trainer.sync_weights()  # no one knows which weights the engine has
    trainer.sync_weights()
    trainer.rollout_wg_generate(DataProto())
    trainer.update(DataProto(), {}, {})
    trainer.state.begin_step()
    trainer.sync_weights()
    assert group.calls == [("sync", 1), "generate", "update", ("sync", 2)]


def test_nothing_is_synced_after_a_validation_or_without_an_update(trainer):
    trainer.rollout_wg_generate(DataProto())  # the workers sync by themselves
    trainer.sync_weights()
    trainer.run_config = RunConfig.parse(OmegaConf.create({"trainer": {"critic_warmup": 9}}))
    trainer.update(DataProto(), {}, {})
    trainer.sync_weights()
    assert trainer.actor_rollout_wg.calls == ["generate"]


def test_workers_of_a_fork_may_lack_the_call(trainer):
    trainer.actor_rollout_wg = SimpleNamespace(generate_sequences=lambda requests: requests)
    trainer.sync_weights()
    trainer.rollout_wg_generate(DataProto())


def test_the_loop_uses_what_a_fork_writes_to_the_configuration(trainer):
    trainer.config = OmegaConf.create({"trainer": {"critic_warmup": 9}})  # after the constructor
    trainer.ref_in_actor = False
    trainer.init_workers({"actor_rollout": trainer.actor_rollout_wg})
    assert trainer.run_config.trainer.critic_warmup == 9
    trainer.update(DataProto(), {}, {})
    assert trainer.actor_rollout_wg.calls == ["init_model"]
