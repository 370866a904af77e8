"""What a step leaves in the record beside its metrics."""

import math

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.trainer.ppo.records import StepRecord, choose_rows, length_histogram, shortened
from verl.trainer.ppo.shaping import vetoed_rows

ROWS, WIDTH = 6, 8
VETO_THRESHOLD = 1e-4


class Tokenizer:
    def batch_decode(self, ids, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(map(str, row)) for row in ids.tolist()]


class Group:
    """A group of two workers."""

    def __init__(self, weights):
        self.weights = weights

    def report_step(self, digests):
        report = {"seconds": {"update_actor": 1.5}, "memory": {"host_gb": 2.0}}
        known = {"random_state": "r"} | ({"weights": self.weights} if self.weights else {})
        self.asked = [{"rank": rank, **report, **({"digests": dict(known)} if digests else {})} for rank in range(2)]
        return ["a reference"] * 2

    def wait(self, references, method):
        assert references == ["a reference"] * 2 and method == "report_step"
        return self.asked


@pytest.fixture
def batch():
    lengths = torch.tensor([8, 1, 2, 3, 8, 0])
    mask = (torch.arange(WIDTH) < lengths.unsqueeze(1)).long()
    prompts = torch.arange(ROWS).unsqueeze(1)
    scores = torch.zeros(ROWS, WIDTH)
    scores[:, 0] = torch.tensor([0.1, 0.9, 0.5, 0.3, 0.7, 0.0])
    old, rollout = torch.full((ROWS, WIDTH), -1.0), torch.full((ROWS, WIDTH), -1.0)
    old[2, 1] = -1.0 + math.log(1e-5)  # the third response
    old[1, 5] = -1.0 + math.log(1e-5)  # behind the end of the second
    tensors = {
        "prompts": prompts,
        "responses": torch.arange(ROWS * WIDTH).reshape(ROWS, WIDTH),
        "attention_mask": torch.cat([torch.ones(ROWS, 1).long(), mask], 1),
        "response_mask": mask,
        "token_level_scores": scores,
        "old_log_probs": old,
        "rollout_log_probs": rollout,
    }
    columns = {
        "uid": np.array([f"u{i}" for i in range(ROWS)], dtype=object),
        "reward_model": np.array([{"ground_truth": str(i)} for i in range(ROWS)], dtype=object),
        "reward_failure": np.array([None] * (ROWS - 1) + ["timed out"], dtype=object),
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=columns)


GROUPS = {"actor_rollout": Group("w"), "critic": Group("c"), "rm": Group(None)}


def finished(record, batch, metrics=None):
    record.ask_workers(GROUPS)
    return record.finish(batch, {} if metrics is None else metrics)


def test_details_of_a_step(batch):
    record = StepRecord(digests=True, num_samples=4, tokenizer=Tokenizer(), veto_threshold=VETO_THRESHOLD)
    record.phase("generate", batch.select(batch_keys=["prompts", "responses"]))
    record.phase("generate", batch.select(batch_keys=["prompts", "attention_mask"]))  # a recipe draws once more
    record.phase("shape", batch)
    metrics = {}
    details = finished(record, batch, metrics)
    assert 0 < metrics["timing_s/record"] < 10 and details["workers"]["driver"][0]["memory"]["host_gb"] > 0.05
    phases = details["phases"]
    assert [sorted(phases[name]) for name in ("generate", "generate#2")] == [
        ["prompts", "responses"],
        ["attention_mask"],
    ]
    assert sorted(phases["shape"]) == ["old_log_probs", "response_mask", "rollout_log_probs", "token_level_scores"]
    ranks = [f"{group}, rank {rank}" for group in ("actor_rollout", "critic") for rank in (0, 1)]
    assert sorted(phases["weights"]) == ranks
    assert sorted(phases["random state"]) == sorted([*ranks, "rm, rank 0", "rm, rank 1"])
    assert details["workers"]["rm"][1] == {"rank": 1, "seconds": {"update_actor": 1.5}, "memory": {"host_gb": 2.0}}
    assert details["response_length"] == {"limit": 8, "counts": [1, 1, 1, 1, 0, 0, 0, 2]}
    kinds = [(sample["kind"], sample["uid"]) for sample in details["samples"]]
    assert kinds == [("vetoed", "u2"), ("best", "u1"), ("best", "u4"), ("worst", "u5")]
    assert details["samples"][-1] == {
        "kind": "worst", "prompt": "5", "response": "40 41 42 43 44 45 46 47", "score": 0.0, "tokens": 0, "truth": "5",
        "uid": "u5", "reward_failure": "timed out",
    }  # fmt: skip
    again = StepRecord(digests=True, num_samples=0)
    again.phase("generate", batch.select(batch_keys=["prompts", "responses"]))
    assert finished(again, batch)["phases"]["generate"] == phases["generate"]
    record.phase("generate", batch)  # the next step begins anew
    assert "generate#2" not in finished(record, batch)["phases"]


def phases_of(*steps):
    record = StepRecord(digests=True, num_samples=0)
    for name, batch, *row_order in steps:
        record.phase(name, batch, *row_order)
    last = steps[-1][1]
    shown = last.select(batch_keys=["prompts", "responses", "attention_mask", "token_level_scores"])
    return finished(record, shown)["phases"]


def test_a_row_of_the_data_that_differs_is_seen_where_it_enters(batch):
    def prepared(**columns):
        other = batch.select(batch_keys=["prompts"], deepcopy=True)
        other.non_tensor_batch |= {name: np.array(values, dtype=object) for name, values in columns.items()}
        return [("prepare", other), ("shape", batch)]

    truths = [{"ground_truth": str(row)} for row in range(ROWS)]
    known = phases_of(*prepared())["prepare"]
    assert known.keys() == {"prompts", "uid", "reward_model", "reward_failure"}
    assert phases_of(*prepared(reward_model=truths))["prepare"] == known
    truths[3] = {"ground_truth": "other"}
    other = phases_of(*prepared(reward_model=truths))["prepare"]
    assert [name for name in known if other[name] != known[name]] == ["reward_model"]
    images = [{"pixel_values": torch.full((2, 3), float(row)), "grid": np.array([row])} for row in range(ROWS)]
    first = phases_of(*prepared(multi_modal_inputs=images))["prepare"]
    images[5]["pixel_values"][1, 2] = 0
    second = phases_of(*prepared(multi_modal_inputs=images))["prepare"]
    assert [name for name in first if second[name] != first[name]] == ["multi_modal_inputs"]


def test_scores_are_those_of_the_phase_that_began_them(batch):
    before = batch.select(batch_keys=["prompts", "responses"])
    phases = phases_of(("generate", before), ("score", before), ("infer", before), ("shape", batch))
    assert list(phases)[:4] == ["generate", "score", "infer", "shape"]
    assert list(phases["score"]) == ["token_level_scores"] and "token_level_scores" not in phases["shape"]


def test_rows_count_in_the_order_of_the_data(batch):
    """However the workers share them."""
    arranged = batch.select(batch_keys=list(batch.batch.keys()), deepcopy=True)
    order = [4, 0, 5, 2, 1, 3]
    arranged.reorder(torch.tensor(order))
    back = np.argsort(order).tolist()
    assert phases_of(("shape", arranged, back))["shape"] == phases_of(("shape", batch, list(range(ROWS))))["shape"]
    assert phases_of(("shape", arranged))["shape"] != phases_of(("shape", batch))["shape"]


def test_what_is_switched_off(batch):
    record = StepRecord(digests=False, num_samples=0)
    record.phase("generate", batch)
    details = finished(record, batch)
    assert sorted(details) == ["response_length", "workers"] and "digests" not in details["workers"]["critic"][0]


def test_who_is_vetoed(batch):
    assert vetoed_rows(batch, VETO_THRESHOLD).tolist() == [False, False, True, False, False, False]
    assert not vetoed_rows(batch, None).any()
    assert not vetoed_rows(batch.select(batch_keys=["old_log_probs", "response_mask"]), VETO_THRESHOLD).any()


def test_choice_of_rows():
    scores = torch.tensor([3.0, 1.0, 2.0])
    none = torch.zeros(3, dtype=torch.bool)
    assert choose_rows(scores, none, 2) == {0: "best", 1: "worst"}
    assert choose_rows(scores, none, 10) == {0: "best", 2: "best", 1: "worst"}
    assert choose_rows(scores, ~none, 1) == {0: "vetoed"}
    equal = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.0, 0.0])
    chosen = choose_rows(equal, torch.zeros(6, dtype=torch.bool), 4, uids=list("aabbcc"))
    assert chosen == {0: "best", 2: "best", 5: "worst", 3: "worst"}


def test_long_texts_lose_their_middle():
    assert shortened("short") == "short"
    text = shortened("a" * 900 + "b" * 900, limit=1000)
    assert text == "a" * 500 + "\n[... 800 characters ...]\n" + "b" * 500
    batch = DataProto.from_dict(tensors={"responses": torch.zeros(1, 2), "attention_mask": torch.ones(1, 3)})
    assert length_histogram(batch) == {"limit": 2, "counts": [0, 1]}
