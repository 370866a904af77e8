"""The weight sync in the loop: when the driver asks the workers for it."""

from types import SimpleNamespace

import pytest
import torch
from omegaconf import OmegaConf

from verl.protocol import DataProto
from verl.single_controller.base import WorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.records import StepRecord
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
    made.use_critic = made.use_rm = False
    made.actor_rollout_wg = Group()
    return made


def test_the_engine_is_synced_once_for_each_update(trainer):
    group = trainer.actor_rollout_wg
    trainer.sync_weights()  # no one knows which weights the engine has
    trainer.sync_weights()
    trainer.rollouts.generate(DataProto())
    trainer.update(DataProto(), {}, {})
    trainer.state.begin_step()
    trainer.sync_weights()
    assert group.calls == [("sync", 1), "generate", "update", ("sync", 2)]


def test_nothing_is_synced_after_a_validation_or_without_an_update(trainer):
    trainer.rollouts.generate(DataProto())  # the workers sync by themselves
    trainer.sync_weights()
    trainer.run_config = RunConfig.parse(OmegaConf.create({"trainer": {"critic_warmup": 9}}))
    trainer.update(DataProto(), {}, {})
    trainer.sync_weights()
    assert trainer.actor_rollout_wg.calls == ["generate"]


def test_workers_of_a_fork_may_lack_the_call(trainer):
    trainer.actor_rollout_wg = SimpleNamespace(generate_sequences=lambda requests: requests)
    trainer.sync_weights()
    assert trainer.state.engine_version is None, "nothing was synced"
    trainer.rollouts.generate(DataProto())
    assert trainer.state.engine_version == trainer.state.weights_version


def test_a_manager_of_a_fork_keeps_its_methods_and_gets_those_that_it_lacks(trainer):
    manager = SimpleNamespace(generate_sequences=lambda requests: requests, take_attempts=lambda: [{"uid": "u"}])
    attempts = []
    trainer.async_rollout_manager = manager
    trainer.records = SimpleNamespace(log_attempts=attempts.extend)
    trainer.rollouts.wait_until_ready()
    trainer.rollouts.generate(DataProto())
    trainer.rollouts.flush_traces()
    assert attempts == [{"uid": "u"}] and trainer.rollouts.take_timeline() == []
    assert trainer.async_rollout_manager is manager


def test_a_group_of_workers_without_these_methods_reports_nothing():
    class Workers(WorkerGroup):
        def _is_worker_alive(self, worker):
            return True

    group = Workers(None)
    group.start_timeline()
    assert group.report_step(digests=True) == group.take_attempts() == []
    record = StepRecord(digests=False, num_samples=0)
    record.ask_workers({"actor": group})
    ids = torch.ones(1, 2, dtype=torch.long)
    batch = DataProto.from_dict({"responses": ids, "prompts": ids, "attention_mask": torch.ones(1, 4)})
    assert list(record.finish(batch, {})["workers"]) == ["driver"]


def test_the_loop_uses_what_a_fork_writes_to_the_configuration(trainer):
    trainer.config = OmegaConf.create({"trainer": {"critic_warmup": 9}})  # after the constructor
    trainer.ref_in_actor = False
    trainer.init_workers({"actor_rollout": trainer.actor_rollout_wg})
    assert trainer.run_config.trainer.critic_warmup == 9
    trainer.update(DataProto(), {}, {})
    assert trainer.actor_rollout_wg.calls == ["init_model"]
