"""When workers can start before the number of training steps is known, and how they get it then."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
import ray

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
    assert WorkerStart(None, lambda: groups).result(7) is groups and said.result(0) == 7
    silent = {"critic": SimpleNamespace()}
    assert WorkerStart(7, lambda: silent).result(7) is silent
    with pytest.raises(RuntimeError, match="gives 7 steps, but its files gave 8: set trainer.total_training_steps"):
        WorkerStart(8, lambda: silent).result(7)
