"""A batch that has begun and is taken later: what the manager asks, and what it says of the weights that sampled it."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from verl.experimental.agent_loop.attempts import Attempt, TrajectoryError
from verl.experimental.agent_loop.manager import AgentLoopManager
from verl.protocol import DataProto


class Remote:
    def __init__(self, method: Any) -> None:
        self.remote = method


class Group:
    """The trainer's workers, whose weights have the version ``version``; they note what they are asked."""

    def __init__(self) -> None:
        self.version, self.calls = 3, []

    def sync_servers(self, handles: Any, step: int) -> list[dict[str, str]]:
        self.calls.append(("sync", step))
        return [{}]

    def trained_version(self) -> list[int]:
        return [self.version]

    def wait(self, refs: list[Any], method: str) -> list[Any]:
        return []

    def wait_for_callers(self, callers: Any, refs: list[Any], method: str) -> list[DataProto]:
        self.calls.append("wait")
        return [ref() for ref in refs]

    def generation_report(self, seconds: float, lengths: Any, oldest: Any, planned: Any) -> list[DataProto]:
        self.calls.append(("report", oldest, planned))
        return [DataProto(meta_info={"timing": {"generate_sequences": seconds}, "metrics": {}})]


class Servers:
    """Standalone servers that live; they note who looks after them."""

    def __init__(self) -> None:
        self.handles, self.replicas, self.watched_with = {}, [], []

    def sync(self, send: Any) -> None:
        send({})

    def watched(self, send: Any, keeps_weights: bool) -> Any:
        self.watched_with.append(keeps_weights)
        return nullcontext()

    def look_after(self, *args: Any) -> None:
        return


def loops(version: int | None, fails: bool = False) -> Any:
    """An actor that answers when it is waited for, with rows that this version has sampled."""

    def answer(part: DataProto) -> Any:
        def result() -> DataProto:
            if fails:
                raise TrajectoryError("row 0 failed")
            tensors = {"attention_mask": torch.ones(len(part), 4, dtype=torch.long)}
            output = DataProto.from_dict(tensors=tensors, non_tensors={"uid": part.non_tensor_batch["uid"]})
            line = {"uid": "a", "sample": 0, "outcome": "ok", "id": "1-train-a-0-0", "reason": None}
            output.meta_info = {
                "seconds": [{"generate_sequences": 1.0, "tool_calls": 0.0}] * len(part),
                "attempts": [dict(line)],
                "versions": [version] * len(part),
                "sampled_by": [[]] * len(part),
                "elapsed_s": 2.5,
            }
            return output

        return result

    return SimpleNamespace(generate_sequences=Remote(answer))


def make_manager(*workers: Any) -> AgentLoopManager:
    manager = AgentLoopManager.__new__(AgentLoopManager)
    manager.worker_group, manager.servers, manager.rm_wg = Group(), Servers(), None
    manager.rollout_replicas, manager.server_handles = [], []
    manager.agent_loop_workers, manager._names = list(workers), [f"worker {i}" for i in range(len(workers))]
    manager._preparing, manager._attempts, manager._timeline = [], [], []
    return manager


def prompts(count: int = 4) -> DataProto:
    batch = DataProto.from_dict(tensors={"input_ids": torch.zeros(count, 2)})
    batch.non_tensor_batch["uid"] = np.array(list("abcd")[:count], dtype=object)
    batch.meta_info["global_steps"] = 7
    return batch


def test_a_batch_is_taken_after_the_trainer_has_gone_on() -> None:
    manager = make_manager(loops(3), loops(2))
    group: Any = manager.worker_group
    pending = manager.begin(prompts(), trains_meanwhile=True)
    assert group.calls == [("sync", 7)] and pending.planned_version == 3
    group.version = 5  # the trainer has made two steps of its optimizer
    output = manager.finish(pending)
    assert group.calls[1:] == ["wait", ("report", 2, 3)]
    assert output.non_tensor_batch["versions_behind"].tolist() == [2, 2, 3, 3]
    assert output.meta_info["timing"]["generate_sequences"] == 2.5  # what the loops took, not the wait for the trainer
    assert manager.servers.watched_with == [True]  # the servers keep their weights
    assert len(manager.take_attempts()) == 2


def test_a_batch_that_is_waited_for_has_no_plan() -> None:
    manager = make_manager(loops(3), loops(3))
    output = manager.generate_sequences(prompts())
    assert manager.worker_group.calls == [("sync", 7), "wait", ("report", 3, None)]
    assert "versions_behind" not in output.non_tensor_batch
    assert manager.servers.watched_with == [False]
    assert output.non_tensor_batch["uid"].tolist() == list("abcd")


@pytest.mark.parametrize("stays_awake", [True, False])
def test_engines_sleep_unless_the_next_call_is_a_generation(stays_awake: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    manager, sleeps = make_manager(loops(3)), []
    monkeypatch.setattr(manager, "sleep", lambda: sleeps.append("sleep"))
    batch = prompts()
    batch.meta_info["stays_awake"] = stays_awake
    manager.generate_sequences(batch)
    assert sleeps == ([] if stays_awake else ["sleep"])


def test_servers_that_do_not_say_their_version_leave_it_open() -> None:
    manager = make_manager(loops(None))
    output = manager.finish(manager.begin(prompts(), trains_meanwhile=True))
    assert manager.worker_group.calls[-1] == ("report", None, 3)
    assert output.non_tensor_batch["versions_behind"].tolist() == [None] * 4


def test_a_batch_that_fails_is_in_the_account() -> None:
    manager = make_manager(loops(3, fails=True))
    pending = manager.begin(prompts(), trains_meanwhile=True)
    with pytest.raises(TrajectoryError, match="row 0 failed"):
        manager.finish(pending)
    assert {line["uid"] for line in manager.take_attempts()} == set("abcd")


def test_what_keeps_servers_from_coming_back_ends_the_batch() -> None:
    manager = make_manager(loops(3))
    pending = manager.begin(prompts(), trains_meanwhile=True)
    pending.watch.failures.append(OSError("no device is left"))
    with pytest.raises(OSError, match="no device is left"):
        manager.finish(pending)
    assert len(manager.take_attempts()) == 4


def test_only_servers_with_their_own_devices_generate_meanwhile() -> None:
    manager = make_manager(loops(3))
    manager.servers = None
    with pytest.raises(AssertionError, match="only standalone servers"):
        manager.begin(prompts(), trains_meanwhile=True)


def test_the_oldest_version_of_an_attempt() -> None:
    attempt = Attempt("1-train-a-0-0", "a", 0, "loop")
    attempt.sampled_by([])
    assert attempt.oldest_version is None
    attempt.sampled_by([(4, 7), (-1, 3), (2, 0)])  # no weights of a trainer, and no tokens
    assert attempt.oldest_version == 4
    attempt.sampled_by([(5, 1)])
    assert attempt.oldest_version == 4
    attempt.sampled_by([(5, 1), (3, 2)])
    assert attempt.oldest_version == 3
