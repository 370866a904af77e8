"""The reward of a step: what is waited for when, and what the reward function gets to see."""

import functools

import numpy as np
import pytest
import torch

from verl.protocol import DataProto
from verl.single_controller.base.decorator import make_nd_compute_dataproto_dispatch_fn, register
from verl.single_controller.base.driver_phase import phase
from verl.trainer.ppo.reward import PendingReward, compute_reward
from verl.utils.import_utils import load_extern_type
from verl.utils.observe import activity
from verl.workers.roles import RewardModelWorker


class Group:
    """A reward model that tells when it is asked and when it is waited for."""

    def __init__(self, events):
        self.events = events

    def start_rm_score(self, data):
        self.asked = data
        self.events.append("asked")
        return self

    def get(self):
        self.events.append("waited")
        scores = torch.zeros(self.asked.batch["responses"].shape)
        scores[:, -1] = torch.arange(len(self.asked)) + 1.0
        return DataProto.from_dict(
            {"rm_scores": scores}, meta_info={"metrics": {"reward_model/truncated_ratio": [0.5, 0]}}
        )


def pending_reward(events, pool, group=None):
    def reward_fn(data, return_dict=False):
        events.append("rule")
        return {"reward_tensor": data.batch["rm_scores"] * 2, "reward_extra_info": {"acc": [1.0] * len(data)}}

    return PendingReward(reward_fn, group, own_pool=pool)


def batch(**more):
    tensors = {name: torch.ones(3, 4, dtype=torch.long) for name in ("input_ids", "attention_mask", "position_ids")}
    columns = {"uid": np.array(["a", "b", "c"], dtype=object), "raw_prompt": np.array([[], [], None], dtype=object)}
    data = DataProto.from_dict({**tensors, "responses": torch.ones(3, 2, dtype=torch.long), **more}, columns)
    data.meta_info["global_steps"] = 7
    return data


@pytest.mark.parametrize(
    ("pool", "order"),
    [(False, ["asked", "waited", "rule", "between"]), (True, ["asked", "between", "waited", "rule"])],
)
def test_only_workers_of_its_own_score_beside_other_passes(pool, order):
    events, metrics = [], {}
    group, data = Group(events), batch()
    pending = pending_reward(events, pool, group).start(data, metrics)
    events.append("between")
    scores, extras = pending.take(data, metrics)
    assert events == order
    assert data.batch["rm_scores"][:, -1].tolist() == [1, 2, 3]
    assert scores[:, -1].tolist() == [2, 4, 6] and extras == {"acc": [1.0] * 3}
    assert metrics == {"reward_model/truncated_ratio": 0.25}
    asked = group.asked
    assert set(asked.batch.keys()) == {"input_ids", "attention_mask", "position_ids", "responses"}
    assert list(asked.non_tensor_batch) == ["raw_prompt"] and asked.meta_info["global_steps"] == 7
    assert len(asked.select_idxs([0, 1, 2])) == 3 and asked.is_padding_enabled()


@pytest.mark.parametrize("pool", [False, True])
def test_a_worker_of_a_fork_has_no_call_that_does_not_wait(pool):
    """It reads the columns that it likes, and its batch is padded like that of our workers."""
    events = []

    class Forked:
        def compute_rm_score(self, data):
            assert data.is_padding_enabled() and data.meta_info["global_steps"] == 7
            events.append(sorted(data.batch.keys() | data.non_tensor_batch.keys()))
            return DataProto.from_dict({"rm_scores": data.batch["mine"]})

    data = batch(mine=torch.tensor([[0, 3.0], [1.0, 0], [0, 0]]))
    columns = sorted(data.batch.keys() | data.non_tensor_batch.keys())
    metrics = {}
    scores, _ = pending_reward(events, pool, Forked()).start(data, metrics).take(data, metrics)
    assert events == [columns, "rule"] and metrics == {} and scores.sum(-1).tolist() == [6, 2, 0]
    assert not data.is_padding_enabled()


def test_a_subclass_scores_by_its_own_method():
    class Mine(RewardModelWorker):
        @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="reward"))
        def compute_rm_score(self, data):
            return DataProto.from_dict({"rm_scores": data.batch["responses"] * 5.0})

    assert Mine.__new__(Mine).start_rm_score(batch()).batch["rm_scores"].tolist() == [[5.0, 5.0]] * 3


def test_scores_that_are_there_are_not_asked_for():
    events = []
    data = batch(rm_scores=torch.tensor([[0, 3.0], [1.0, 0], [0, 0]]))
    scores, _ = pending_reward(events, True, Group(events)).start(data, {}).take(data, {})
    assert events == ["rule"] and scores.sum(-1).tolist() == [6, 2, 0]
    events.clear()
    pending_reward(events, pool=True).start(data, {})
    assert events == ["rule"]


def test_the_manager_of_the_docs_joins_model_and_rule():
    from pathlib import Path

    from examples.tiny_model import byte_tokenizer
    from verl.workers.rewards.managers import REWARD_MANAGER_REGISTRY

    page = (Path(__file__).parents[3] / "docs" / "reward_models.md").read_text()
    (code,) = [block for block in page.split("```python\n")[1:] if "model_and_rule" in block]
    try:
        exec(code.split("```")[0], {})
        manager = REWARD_MANAGER_REGISTRY["model_and_rule"](byte_tokenizer(), 0, lambda **row: 2.0)
    finally:
        REWARD_MANAGER_REGISTRY.pop("model_and_rule", None)
    columns = {"data_source": ["s"] * 3, "reward_model": [{"ground_truth": ""}] * 3}
    data = batch(rm_scores=torch.tensor([[0, 3.0], [0, 1.0], [0, -2.0]]), prompts=torch.ones(3, 2, dtype=torch.long))
    data.non_tensor_batch.update({name: np.array(values, dtype=object) for name, values in columns.items()})
    assert manager(data)[:, 1].tolist() == pytest.approx([2.3, 2.1, 1.8])
    assert manager(data)[:, 1].tolist() == [2.0] * 3  # in validation there are no rm_scores


SCORER = """
import json

def compute_score(data_source, path):
    return json.load(open(path))
"""


def test_the_launching_process_learns_of_the_scorer_that_runs(tmp_path, monkeypatch):
    """It names the scorer when the trainer dies in it."""
    monkeypatch.setattr(activity, "_file", None)  # which is put back
    (tmp_path / "mine.py").write_text(SCORER)
    (tmp_path / "activity.json").touch()
    scorer = functools.partial(load_extern_type(str(tmp_path / "mine.py"), "compute_score"), "letters")
    during = []

    class Manager:
        compute_score = scorer

        def __call__(self, data):
            during.append(scorer(tmp_path / "activity.json"))
            return torch.zeros(1, 2)

    activity.report_activity_to(tmp_path / "activity.json")
    with phase("reward", step=4):
        compute_reward(DataProto.from_dict({"responses": torch.zeros(1, 2)}), Manager())
    after = activity.ActivityFile(tmp_path / "activity.json").read()
    assert during[0]["phase"] == "in phase reward, step 4"
    assert during[0]["scorer"] == f"compute_score of {tmp_path}/mine.py"
    assert str(after) == "after phase reward, step 4"
