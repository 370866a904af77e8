"""What a release asks of an engine that can sleep, held on engines that record it."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.rollout.sglang_rollout import SGLangRollout
from verl.workers.rollout.vllm_rollout import vllm_rollout
from verl.workers.rollout.vllm_rollout.vllm_rollout import vLLMRollout
from verl.workers.sharding_manager import FSDPVLLMShardingManager, complete

LEVELS = (1, 2)


class Engine:
    """vLLM's engine as it answers these calls; one that is half awake takes itself for asleep up to 0.30."""

    def __init__(self, knows_halves: bool) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.asleep: set[str] = set()
        self._knows_halves = knows_halves

    def sleep(self, level: int = 1, mode: str = "abort") -> None:
        self.calls.append(("sleep", level, mode))
        if not ("weights" in self.asleep if self._knows_halves else self.asleep):
            self.asleep = {"weights", "kv_cache"}

    def wake_up(self, tags: list[str]) -> None:
        self.calls.append(("wake", *tags))
        self.asleep.difference_update(tags)


def vllm(level: int, knows_halves: bool, monkeypatch: pytest.MonkeyPatch) -> Any:
    version = {True: "0.31.0", False: "0.30.0"}[knows_halves]
    monkeypatch.setattr("verl.utils.engine_versions.installed_version", lambda pkg="vllm": version)
    rollout: Any = vLLMRollout.__new__(vLLMRollout)
    rollout.config = SimpleNamespace(free_cache_engine=True)
    rollout._llm, rollout._asleep, rollout._caches = Engine(knows_halves), set(), []
    rollout._can_sleep, rollout._sleep_level = True, level
    rollout._version, rollout._usable = 1, True
    return rollout


@pytest.mark.parametrize("level", LEVELS)
def test_vllm_keeps_its_requests_over_a_sleep(level: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = vllm(level, True, monkeypatch)
    complete(rollout.release())
    complete(rollout.release())  # asleep already
    assert rollout._llm.calls == [("sleep", level, "keep")]
    assert rollout.weights_version == (1 if level == 1 else NO_WEIGHTS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("awake", "knows_halves", "wakes"),
    [
        (["weights"], True, []),
        (["weights"], False, [("wake", "kv_cache")]),
        (["kv_cache"], True, [("wake", "weights")]),
        (["weights", "kv_cache"], False, []),
    ],
)
def test_vllm_frees_what_is_awake(
    level: int, awake: list[str], knows_halves: bool, wakes: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after a sync without a generation, when the weights are awake and the cache is not."""
    rollout = vllm(level, knows_halves, monkeypatch)
    complete(rollout.release())
    complete(rollout.resume(awake))
    rollout._version, rollout._usable = 2, True  # synced
    del rollout._llm.calls[:]
    complete(rollout.release())
    assert rollout._llm.calls == [*wakes, ("sleep", level, "keep")]
    assert rollout._llm.asleep == {"weights", "kv_cache"}
    assert rollout.weights_version == (2 if level == 1 else NO_WEIGHTS)
    complete(rollout.resume(["weights", "kv_cache"]))
    assert not rollout._llm.asleep


def test_a_sync_without_a_generation_frees_the_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = vllm(2, True, monkeypatch)
    manager = FSDPVLLMShardingManager(SimpleNamespace(weights_version=0), rollout)  # type: ignore[arg-type]

    class Sync:
        def __init__(self, *args: Any) -> None:
            pass

        def run(self) -> dict[str, float]:
            rollout._version, rollout._usable = 0, True
            return {}

    monkeypatch.setattr("verl.workers.sharding_manager.hybrid.WeightSync", Sync)
    manager.sync()
    complete(manager.give_to_trainer())
    assert rollout._llm.calls == [("sleep", 2, "keep"), ("wake", "weights"), ("sleep", 2, "keep")]


@pytest.mark.parametrize("awake", [["weights"], ["kv_cache"], ["weights", "kv_cache"]])
def test_sglang_frees_what_is_awake(awake: list[str]) -> None:
    calls: list[tuple[Any, ...]] = []
    rollout: Any = SGLangRollout.__new__(SGLangRollout)
    rollout._group = SimpleNamespace(by_leader=lambda work: work())
    rollout._ask = lambda *asked: calls.append(asked)
    rollout._can_release, rollout._released, rollout._is_paused = True, set(), False
    rollout._version, rollout._usable, rollout.run_step = 1, True, None

    async def run() -> None:
        await rollout.release()
        await rollout.release()
        await rollout.resume(awake)
        rollout._version, rollout._usable = 2, True
        del calls[2:]
        await rollout.release()

    asyncio.run(run())
    assert calls == [("pause",), ("release", ["kv_cache", "weights"]), ("release", sorted(awake))]
    assert rollout._released == {"weights", "kv_cache"} and rollout.weights_version == NO_WEIGHTS


def test_an_engine_that_cannot_sleep_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rollout = vllm(2, True, monkeypatch)
    rollout._can_sleep = False
    complete(rollout.release())
    assert rollout._llm.calls == [] and rollout.weights_version == 1
    assert vllm_rollout.can_sleep_half_awake({"kv_cache"})
