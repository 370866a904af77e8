"""A reward model with its own devices scores the parts of a batch that are there."""

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.waiting import PATIENCE_S
from verl.protocol import DataProto
from verl.workers.rewards import model_scores
from verl.workers.rewards.model_scores import ScoresOfParts


class Part:
    """A part of a batch that ends when a test says so."""

    def __init__(self, batch: DataProto) -> None:
        self.batch = batch
        self.ended = threading.Event()


class Group:
    """A reward model whose score is the sum of the response; ``asked`` are the parts that it got."""

    def __init__(self) -> None:
        self.asked: list[DataProto] = []
        self.called = threading.Event()

    def start_rm_score(self, data: DataProto) -> Any:
        self.asked.append(data)
        self.called.set()
        scores = data.batch["responses"].float()
        metrics = {"reward_model/truncated_ratio": 1.0 / len(data), "perf/memory/reward_model/allocated": len(data)}
        output = DataProto.from_dict({"rm_scores": scores}, meta_info={"metrics": metrics})
        return SimpleNamespace(get=lambda: output)


def batch_of(*responses: int) -> DataProto:
    tokens = torch.tensor(responses).unsqueeze(-1)
    tensors = {"responses": tokens, "input_ids": tokens, "attention_mask": tokens > 0, "position_ids": tokens * 0}
    return DataProto.from_dict(tensors, {"raw_prompt": np.array([f"ask {r}" for r in responses], dtype=object)})


@pytest.fixture(autouse=True)
def without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    def wait(refs: list[Part], num_returns: int) -> tuple[list[Part], list[Part]]:
        while True:
            for part in refs:
                if part.ended.wait(0.001):
                    return [part], [other for other in refs if other is not part]

    def get(part: Part) -> DataProto:
        if isinstance(part.batch, Exception):
            raise part.batch
        return part.batch

    monkeypatch.setattr(model_scores, "ray", SimpleNamespace(wait=wait, get=get))


def test_a_part_is_scored_while_others_are_generated() -> None:
    slow, quick = Part(batch_of(1, 2, 3)), Part(batch_of(7))
    asked = [batch_of(1, 2, 3), batch_of(7)]
    for each in asked:
        each.non_tensor_batch = {"reward_model": np.array([{}] * len(each), dtype=object)}
    group = Group()
    scores = ScoresOfParts(group, [slow, quick], asked)
    quick.ended.set()
    assert group.called.wait(PATIENCE_S), "the reward model has not got the part that has ended"
    assert not slow.ended.is_set()
    slow.ended.set()
    metrics = scores.add_to([slow.batch, quick.batch])
    assert slow.batch.batch["rm_scores"].tolist() == [[1.0], [2.0], [3.0]]
    assert quick.batch.batch["rm_scores"].tolist() == [[7.0]]
    assert [list(each.non_tensor_batch["raw_prompt"]) for each in group.asked] == [
        ["ask 7"],
        ["ask 1", "ask 2", "ask 3"],
    ]
    assert all("reward_model" in each.non_tensor_batch for each in group.asked)
    # Two of four rows: one in each part; the peak of the memory is that of the largest part.
    assert metrics == {"reward_model/truncated_ratio": 0.5, "perf/memory/reward_model/allocated": 3}


def test_a_batch_with_more_rows_is_scored_as_a_whole_later() -> None:
    one, more = Part(batch_of(1)), Part(batch_of(2, 3))
    scores = ScoresOfParts(Group(), [one, more], [one.batch, batch_of(2)])
    one.ended.set()
    more.ended.set()
    assert scores.add_to([one.batch, more.batch]) == {}
    assert "rm_scores" not in one.batch.batch.keys() and "rm_scores" not in more.batch.batch.keys()


def test_an_error_of_the_reward_model_reaches_the_caller() -> None:
    def fail(data: DataProto) -> Any:
        raise RuntimeError("no memory")

    part = Part(batch_of(1))
    part.ended.set()
    scores = ScoresOfParts(SimpleNamespace(start_rm_score=fail), [part], [part.batch])
    with pytest.raises(RuntimeError, match="no memory"):
        scores.add_to([part.batch])


def test_a_worker_of_a_fork_gets_the_columns_of_its_requests() -> None:
    asked: list[DataProto] = []

    def compute_rm_score(data: DataProto) -> DataProto:
        asked.append(data)
        return DataProto.from_dict({"rm_scores": data.batch["responses"].float()})

    answer = batch_of(2, 3)
    request = DataProto.from_dict(non_tensors={"extra_info": ["a", "b"]})
    del answer.non_tensor_batch["raw_prompt"]
    part = Part(answer)
    part.ended.set()
    scores = ScoresOfParts(SimpleNamespace(compute_rm_score=compute_rm_score), [part], [request])
    assert scores.add_to([answer]) == {}
    assert answer.batch["rm_scores"].flatten().tolist() == [2, 3]
    assert asked[0].non_tensor_batch["extra_info"].tolist() == ["a", "b"]
