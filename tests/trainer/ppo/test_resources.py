"""When workers can start before the number of training steps is known, and how they get it then."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray
from omegaconf import OmegaConf

from verl.trainer.ppo import resources
from verl.trainer.ppo.resources import WorkerStart, take_steps_later
from verl.workers import fsdp_workers, megatron_workers


class Renamed(fsdp_workers.CriticWorker):
    """Has the constructor of the critic."""


class ReadsTheSteps(fsdp_workers.CriticWorker):
    """Has its own constructor, which may do anything with the number."""

    def __init__(self, config):
        super().__init__(config)
        self.half = config.optim.total_training_steps // 2


class Foreign:
    """Is not one of these workers at all."""


def test_constructors_of_forks_get_the_number_of_steps():
    own = [fsdp_workers.ActorRolloutRefWorker, fsdp_workers.AsyncActorRolloutRefWorker, fsdp_workers.CriticWorker]
    own += [fsdp_workers.RewardModelWorker, megatron_workers.ActorRolloutRefWorker, Renamed]
    assert take_steps_later(own) and take_steps_later(map(ray.remote, own))
    for other in (ReadsTheSteps, Foreign):
        assert not take_steps_later([*own, other]) and not take_steps_later([ray.remote(other)])


def test_workers_are_told_the_number_of_steps_once_it_is_known():
    said: Future[int] = Future()
    groups = {"critic": SimpleNamespace(set_total_training_steps=said.set_result)}
    before, after = configuration(None), configuration(7)
    assert WorkerStart(before, None, lambda: groups).result(after, 7) is groups and said.result(0) == 7
    silent = {"critic": SimpleNamespace()}
    assert WorkerStart(configuration(7), 7, lambda: silent).result(after, 7) is silent


@pytest.mark.parametrize(
    ("known", "change", "key"),
    [
        (None, {"actor_rollout_ref.actor.clip_ratio": 0.3}, "actor_rollout_ref.actor.clip_ratio"),
        (7, {"critic.new": [1]}, "critic.new"),
        (8, {}, "actor_rollout_ref.actor.optim.total_training_steps"),
    ],
)
def test_workers_start_again_where_the_configuration_has_changed(known, change, key, monkeypatch, caplog):
    ended = []
    monkeypatch.setattr(resources, "kill_all", ended.extend)
    groups = {name: SimpleNamespace(workers=[name]) for name in ("actor_rollout", "critic")}
    later = configuration(7)
    for name, value in change.items():
        OmegaConf.update(later, name, value, force_add=True)
    assert WorkerStart(configuration(known), known, lambda: groups).result(later, 7) is None
    assert ended == ["actor_rollout", "critic"] and f"because {key} was changed" in caplog.text


def configuration(steps):
    optim = {"optim": {"total_training_steps": steps, "lr": 1e-6}}
    return OmegaConf.create({"actor_rollout_ref": {"actor": {"clip_ratio": 0.2, **optim}}, "critic": optim})
