"""Rollout classes by name, ours and those from outside."""

import re
from typing import Any

import pytest

from tests.workers.rollout import tiny
from verl.errors import WrongSetting
from verl.workers.config.engines import ENGINES, SERVED_ROLLOUTS, EngineFacts
from verl.workers.rollout import BaseRollout, HFRollout, begin_rollout, get_rollout_class
from verl.workers.rollout.registry import ROLLOUT_CLASSES
from verl.workers.rollout.replica import RolloutReplica, RolloutReplicaRegistry
from verl.workers.sharding_manager import HybridShardingManager, build_sharding_manager

HERE = __name__


class Own(HFRollout):
    """An engine from outside, with a sharding manager and servers of its own."""

    facts = HFRollout.facts._replace(
        modes=("sync", "async"), replica=f"{HERE}.Replica", sharding_managers={"fsdp": f"{HERE}.Manager"}
    )


class Manager(HybridShardingManager):
    """Its sharding manager."""


class Replica(RolloutReplica):
    """Its servers."""


class Nested:
    class Own(HFRollout):
        facts = HFRollout.facts._replace(devices=("cuda",))


class Unfinished(BaseRollout):
    facts = EngineFacts()


class Odd(HFRollout):
    facts: Any = {"modes": ["sync"]}


def test_the_class_answers_for_itself(tmp_path: Any) -> None:
    assert get_rollout_class(f"{HERE}.Own", "async") is Own
    assert RolloutReplicaRegistry.get(f"{HERE}.Own") is Replica
    model = tiny.build_model()
    rollout = tiny.start_rollout(f"{HERE}.Own", model, tmp_path)
    assert type(rollout) is Own
    assert type(build_sharding_manager(tiny.TrainerStandIn(model), rollout)) is Manager


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Manager", "is no rollout engine: derive the class from verl.workers.rollout.BaseRollout"),
        ("Unfinished", "lacks generate_sequences, load, source_checksum, weights_checksum"),
        ("Odd", "has facts={'modes': ['sync']}: write EngineFacts"),
    ],
)
def test_what_is_no_engine_is_refused(name: str, says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"rollout.name={HERE}.{name}: {says}")):
        get_rollout_class(f"{HERE}.{name}")


def test_a_worker_refuses_what_the_engine_does_not_do() -> None:
    with pytest.raises(ValueError, match="trainer.device=cpu: is not supported by Own: write cuda"):
        begin_rollout(tiny.rollout_config(f"{HERE}.Nested.Own"), None, has_trainer=True)  # type: ignore[arg-type]
    with pytest.raises(WrongSetting, match="has no servers"):
        RolloutReplicaRegistry.get(f"{HERE}.Nested.Own")


@pytest.mark.parametrize(("name", "mode"), ROLLOUT_CLASSES)
def test_our_classes_have_the_facts_of_the_table(name: str, mode: str) -> None:
    if name in SERVED_ROLLOUTS:
        pytest.importorskip(name)
    facts = get_rollout_class(name, mode).facts
    assert mode in facts.modes
    assert facts._replace(modes=()) == ENGINES[name]._replace(modes=())


@pytest.mark.parametrize("name", SERVED_ROLLOUTS)
def test_our_replicas_are_those_of_the_table(name: str) -> None:
    pytest.importorskip(name)
    found = RolloutReplicaRegistry.get(name)
    assert f"{found.__module__}.{found.__qualname__}" == ENGINES[name].replica
