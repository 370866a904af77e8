"""Which prompts are kept, and what a step says of its draws: cases by hand, and an obvious reference."""

import numpy as np
import pytest
import torch

from recipe.dapo.dynamic_sampling import Draws, metric_values, varied_groups
from verl.algos.config import FilterGroupsConfig
from verl.errors import WrongInput
from verl.protocol import DataProto

NAN = float("nan")


def array(values) -> np.ndarray:
    return np.array(values, dtype=object)


@pytest.mark.parametrize(
    ("values", "uids", "keep"),
    [
        ([0, 1, 1, 1], "aabb", [1, 1, 0, 0]),
        ([0, 1, 0, 1], "abab", [0, 0, 0, 0]),  # groups need not be neighbours
        ([0, 1, 0, 0], "abba", [0, 1, 1, 0]),
        ([3], "a", [1]),  # a group of one
        ([3, 0, 0], "abb", [1, 0, 0]),
        ([1, 1, 1, 0, 2], "aaabb", [0, 0, 0, 1, 1]),  # uneven groups
        ([0.1, 0.1, 0.1], "aaa", [0, 0, 0]),  # the standard deviation of which is 1.4e-17 by rounding
        ([1, 1 + 1e-15], "aa", [1, 1]),
        ([0, NAN, 1, NAN], "aaaa", [1, 1, 1, 1]),  # what the scorer did not say differs from nothing
        ([0, NAN, 0, NAN, NAN], "aaabb", [0, 0, 0, 0, 0]),
        ([NAN], "a", [1]),
        ([], "", []),
    ],
)
def test_groups_by_hand(values, uids, keep):
    found = varied_groups(np.array(values, dtype=np.float64), array(list(uids)))
    assert found.tolist() == [bool(each) for each in keep]


def test_groups_are_those_whose_standard_deviation_is_above_0():
    draw = np.random.RandomState(0)
    for _ in range(50):
        count = draw.randint(1, 40)
        values, uids = draw.randint(0, 3, count) / 2, array([f"u{i}" for i in draw.randint(0, 12, count)])
        members = [values[uids == uid] for uid in uids]
        assert varied_groups(values, uids).tolist() == [np.std(each) > 0 or len(each) == 1 for each in members]


# ---- the metric


def batch_with(**columns) -> DataProto:
    scores = torch.tensor([[0.0, 1.0], [0.5, 0.25]])
    return DataProto.from_dict({"token_level_scores": scores}, {name: array(each) for name, each in columns.items()})


def test_metrics_by_name():
    batch = batch_with(acc=[True, False], score=[7, 8.5], partial=[None, 2])
    extras = ["acc", "score", "partial"]
    assert metric_values(batch, "acc", extras).tolist() == [1, 0]
    assert metric_values(batch, "score", extras).tolist() == [7, 8.5]  # as the scorer gave it, before any penalty
    assert metric_values(batch, "score", ["acc"]).tolist() == [1, 0.75]
    assert metric_values(batch, "seq_reward", extras).tolist() == [1, 0.75]
    assert metric_values(batch, "seq_final_reward", extras).tolist() == [1, 0.75]  # without KL in the reward
    assert np.array_equal(metric_values(batch, "partial", extras), [NAN, 2], equal_nan=True)
    batch.non_tensor_batch["reward_failure"] = array([None, "raised"])
    for metric, expected in (("acc", 1), ("score", 7), ("seq_reward", 1), ("partial", NAN)):
        assert np.array_equal(metric_values(batch, metric, extras), [expected, NAN], equal_nan=True)
    del batch.non_tensor_batch["reward_failure"]
    batch.batch["token_level_rewards"] = torch.tensor([[0.0, 3.0], [0.0, 4.0]])
    assert metric_values(batch, "seq_final_reward", extras).tolist() == [3, 4]


def test_metrics_that_cannot_be_used_are_named():
    batch = batch_with(acc=[1, 0], pred=["x", "12"], turns=[[1], [2, 3]])
    with pytest.raises(WrongInput, match=r"metric=accuracy: .*seq_final_reward, score, acc, pred$"):
        metric_values(batch, "accuracy", ["acc", "pred"])
    for name, wrong in (("pred", "'x'"), ("turns", r"\[1\]")):
        with pytest.raises(ValueError, match=f"filter_groups.metric={name}: must be a number .* returned {wrong}"):
            metric_values(batch, name, ["acc", "pred", "turns"])


# ---- draws


def draws(wanted: int, limit: int = 0, data_batches: int = 1) -> Draws:
    groups = FilterGroupsConfig(enable=True, metric="acc", max_num_gen_batches=limit)
    return Draws(groups, 3, wanted, data_batches)


def add(counter: Draws, values: list[float], uids: str) -> None:
    numbers = np.array(values, dtype=np.float64)
    counter.add(array(list(uids)), numbers, varied_groups(numbers, array(list(uids))))


def test_a_step_is_full_with_enough_prompts():
    counter = draws(wanted=2, limit=2)
    add(counter, [0, 1, 1, 1], "aabb")
    assert not counter.are_enough
    add(counter, [0, 1, NAN, 0, 1, 1, 0, 0], "ccddeeff"[:8])
    assert not draws(1).are_enough and counter.kept == 1 + 1 and counter.are_enough
    assert counter.metrics() == {
        "train/num_gen_batches": 2,
        "train/num_prompts_drawn": 6,
        "train/num_prompts_dropped": 4,
        "train/num_prompts_surplus": 0,
        "train/filter_metric/mean": pytest.approx(6 / 11),
        "train/filter_metric/num_unknown": 1,
    }


def test_a_full_step_may_be_over_the_number_and_at_the_limit():
    counter = draws(wanted=1, limit=1)
    add(counter, [0, 1, 0, 1], "aabb")
    assert counter.are_enough and counter.metrics()["train/num_prompts_surplus"] == 1


def test_the_limit_is_told_with_what_to_change():
    counter = draws(wanted=2, limit=2)
    add(counter, [1, 1, 1, 0], "aabb")
    with pytest.raises(WrongInput) as caught:
        add(counter, [1, 1, 1, 1], "ccdd")
    message = str(caught.value)
    assert "max_num_gen_batches=2: 2 draws kept 1 prompts of 4, a step needs data.train_batch_size=2" in message
    assert "'acc' (mean of all: 0.875)" in message and "write 0 for no limit, raise data.gen_batch_size" in message


@pytest.mark.parametrize(("data_batches", "patience"), [(1, 10), (10, 10), (13, 13), (100, 100), (5000, 100)])
@pytest.mark.parametrize("limit", [0, -1, 500])
def test_a_step_goes_on_while_anything_is_kept_and_ends_with_data_that_give_nothing(data_batches, patience, limit):
    counter = draws(wanted=3, limit=limit, data_batches=data_batches)
    for _ in range(patience - 1):
        add(counter, [1, 1], "bb")
    add(counter, [0, 1, 1, 1], "aabb")  # something is kept: all is open again
    for _ in range(patience - 1):
        add(counter, [1, 1], "bb")
    told = f"{limit}: nothing was kept in {patience} draws in a row: {2 * patience} draws kept 1 prompts of "
    with pytest.raises(WrongInput, match=f"max_num_gen_batches={told}{2 * patience + 1}, .* too difficult"):
        add(counter, [1, 1], "bb")
