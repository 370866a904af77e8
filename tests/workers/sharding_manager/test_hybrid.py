"""When the sharding manager wakes a rollout and puts it to sleep, with a user's rollout that counts the calls."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from verl.protocol import DataProto
from verl.workers.roles import ActorRolloutRefWorker
from verl.workers.roles.base import EngineWorker
from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager import FSDPVLLMShardingManager, complete, hybrid

START, FREED = ["release"], ["resume weights", "release"]


class Rollout(BaseRollout):
    """A rollout as users write it: its memory is moved by the asynchronous pair."""

    generate_sequences = load = weights_checksum = source_checksum = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.config: Any = SimpleNamespace(free_cache_engine=True)
        self._version = 1

    async def resume(self, tags: list[str]) -> None:
        await super().resume(tags)
        self.calls += [f"resume {tag}" for tag in tags]

    async def release(self, tags: list[str] | None = None) -> None:
        await super().release(tags)
        self.calls.append("release")

    def take(self, engine: Any) -> dict[str, float]:
        self._version = engine.weights_version
        self.calls.append("synced")
        return {}


@pytest.fixture
def manager() -> FSDPVLLMShardingManager:
    engine: Any = SimpleNamespace(weights_version=1)
    return FSDPVLLMShardingManager(engine, Rollout())


def test_a_rollout_wakes_by_its_asynchronous_methods(manager: FSDPVLLMShardingManager) -> None:
    def generate() -> None:
        with manager:
            manager.rollout.calls.append("generate")

    generated = ["resume weights", "resume kv_cache", "generate", "release"]
    generate()
    assert manager.rollout.calls == START + generated

    async def in_an_event_loop() -> None:
        generate()

    asyncio.run(in_an_event_loop())
    assert manager.rollout.calls == START + generated * 2


def test_nothing_sleeps_between_two_generations_with_the_same_weights(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The caller knows that the next call on the devices is a generation; an error, or another call, ends that."""
    rollout, engine = manager.rollout, manager.engine
    monkeypatch.setattr(hybrid, "WeightSync", lambda *args: SimpleNamespace(run=lambda: rollout.take(engine)))
    worker: Any = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    worker.sharding_manager, worker.rollout, worker.engine = manager, rollout, engine
    worker.model_config = SimpleNamespace(eos_token_id=2, pad_token_id=0)
    worker.rollout_config = SimpleNamespace(workers_per_engine=1)
    worker.profiler = None
    worker._sync_timing, worker._is_actor, worker._is_rollout = {}, True, True
    worker._generation_figures = lambda *args: {"timing": {}, "metrics": {}}
    asked = rollout.generate_sequences = lambda prompts: rollout.calls.append("generate") or prompts

    def generate(**meta: Any) -> list[str]:
        del rollout.calls[:]
        worker.generate_sequences(DataProto.from_dict(tensors={"ids": torch.ones(1, 1)}, meta_info=meta))
        return rollout.calls

    engine.weights_version += 1
    wakes = ["resume weights", "synced", "resume kv_cache"]
    assert generate(stays_awake=True) == [*wakes, "generate"]
    assert generate(stays_awake=True) == ["resume kv_cache", "generate"]
    engine.weights_version += 1  # then it gets them, still awake
    assert generate(stays_awake=True) == [*wakes, "generate"]
    assert generate() == ["resume kv_cache", "generate", "release"]
    assert generate(stays_awake=False) == ["resume weights", "resume kv_cache", "generate", "release"]

    def fail(prompts: DataProto) -> None:
        raise RuntimeError("no answer")

    rollout.generate_sequences = fail
    with pytest.raises(RuntimeError, match="no answer"):
        generate(stays_awake=True)
    assert rollout.calls[-1] == "release"
    rollout.generate_sequences = asked
    generate(stays_awake=True)
    worker._sleep_rollout()  # as before a pass of the trainer
    assert rollout.calls[-1] == "release" and not manager.is_awake


def test_the_host_gets_freed_memory_before_a_generation_and_after_it(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hybrid, "return_freed_host_memory_if_short", lambda: manager.rollout.calls.append("returned"))
    with manager:
        manager.rollout.calls.append("generate")
    calls = manager.rollout.calls[len(START) :]
    before = ["returned", "resume weights", "returned", "resume kv_cache"]
    assert calls == [*before, "generate", "release", "returned"]


def test_the_event_loop_of_the_thread_stays(manager: FSDPVLLMShardingManager) -> None:
    """SGLang, and code of users, ask for the loop of the main thread, which ``asyncio.run`` takes away."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        manager.sync()
        assert asyncio.get_event_loop_policy().get_event_loop() is loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def test_a_rollout_may_wait_for_a_server(manager: FSDPVLLMShardingManager) -> None:
    async def wait(tags: list[str]) -> None:
        await asyncio.sleep(0)
        manager.rollout.calls.append("waited")

    manager.rollout.resume = wait
    manager.sync()
    assert manager.rollout.calls == [*START, "waited"]


def test_nothing_trains_or_infers_next_to_an_awake_rollout(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fork's loop syncs, and then does not generate on the engine."""
    complete(manager.give_to_trainer())
    assert manager.rollout.calls == START  # it sleeps already
    worker: Any = ActorRolloutRefWorker.__new__(ActorRolloutRefWorker)
    worker._is_rollout = True
    worker._actor = None
    worker.sharding_manager = manager
    reached = RuntimeError("the engine is reached")

    def reach(*args: Any, **kwargs: Any) -> None:
        raise reached

    manager.sync()
    engine: Any = SimpleNamespace(eval_mode=reach)
    with pytest.raises(RuntimeError, match="is reached"):
        worker._infer(engine, None, None, without_adapter=False)
    assert manager.rollout.calls == START + FREED

    manager.sync()
    worker.actor_config = worker.rollout_config = worker.train_spec = SimpleNamespace(temperature=1.0)
    monkeypatch.setattr("verl.workers.roles.batching.policy_update_spec", reach)
    monkeypatch.setattr(EngineWorker, "update", reach)
    with pytest.raises(RuntimeError, match="is reached"):
        worker.update_actor(None)
    assert manager.rollout.calls == START + FREED * 2
