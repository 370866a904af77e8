"""A step from scalars of the rows gives what the plain step gives."""

import copy
from typing import Any

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf

from verl import DataProto
from verl.algos.aggregate import agg_loss
from verl.algos.config import AlgoConfig
from verl.algos.kl import FixedKLController
from verl.algos.mismatch import calculate_debug_metrics
from verl.algos.names import ADV_ESTIMATORS
from verl.protocol.lazy import (
    BY_REFERENCE,
    LazyTensor,
    by_reference,
    digest_of,
    fetched,
    is_lazy,
    lazy_columns,
    take_touched,
)
from verl.single_controller.base.decorator import DispatchGroup
from verl.trainer.ppo import shaping
from verl.trainer.ppo.metric_utils import compute_data_metrics, compute_timing_metrics, log_prob_metrics
from verl.trainer.ppo.phases import check_rollout, lengths_of
from verl.trainer.ppo.records import length_histogram
from verl.trainer.ppo.reward import leave_unscored_out
from verl.utils.observe.digest import tensor_digest


class Group(DispatchGroup):
    """A worker that shares a process with the test."""

    calls = 0

    def execute_func_rank_zero(self, formula: Any, data: DataProto) -> DataProto:
        """Compute the formula, as ``Worker.execute_func_rank_zero`` does behind its dispatch."""
        assert data.meta_info[BY_REFERENCE]
        self.calls += 1
        return by_reference(formula(fetched(data)), put=copy.deepcopy, block_bytes=100)


def rollout(seed: int, empty_row: bool = False) -> tuple[DataProto, DataProto]:
    """Return requests and a batch after generation and inference, of 8 rows in 4 groups."""
    generator = torch.Generator().manual_seed(seed)
    rows, prompt, width = 8, 4, 6
    lengths = torch.randint(1, width + 1, (rows,), generator=generator)
    if empty_row:
        lengths[5] = 0
    mask = (torch.arange(width) < lengths.unsqueeze(-1)).long()
    responses = torch.randint(5, 99, (rows, width), generator=generator) * mask
    prompts = torch.randint(5, 99, (rows, prompt), generator=generator)
    padding = torch.randint(0, 3, (rows, 1), generator=generator)
    attended = (torch.arange(prompt) >= padding).long()
    old = -torch.rand(rows, width, generator=generator)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat([prompts, responses], -1),
        "attention_mask": torch.cat([attended, mask], -1),
        "response_mask": mask,
        "rollout_log_probs": old + 0.1 * torch.randn(rows, width, generator=generator).clamp(max=0),
    }
    later = {
        "old_log_probs": old,
        "ref_log_prob": -torch.rand(rows, width, generator=generator),
        "values": torch.randn(rows, width, generator=generator),
        "entropys": torch.rand(rows, width, generator=generator),
        "token_level_scores": torch.zeros(rows, width).scatter_(
            1, (lengths - 1).clamp(min=0).unsqueeze(-1), torch.randn(rows, 1, generator=generator)
        ),
    }
    uid = np.array([f"p{row // 2}" for row in range(rows)], dtype=object)
    asked = DataProto.from_dict({"input_ids": prompts, "attention_mask": attended}, {"uid": uid})
    batch = DataProto.from_dict(tensors, {"uid": uid}, {"pad_token_id": 0, "eos_token_id": 1})
    batch.batch["reward_baselines"] = torch.randn(rows, generator=generator)
    for name, value in later.items():
        batch.batch[name] = value
    return asked, batch


def stored(group: Group, asked: DataProto, batch: DataProto) -> DataProto:
    lazy = by_reference(batch, put=copy.deepcopy, block_bytes=300)
    check_rollout(asked, lazy, 1, group=group)
    return lazy


@pytest.mark.parametrize("empty_row", [False, True])
@pytest.mark.parametrize("name", ADV_ESTIMATORS)
def test_a_step_by_reference_equals_the_plain_step(name: str, empty_row: bool) -> None:
    group = Group()
    asked, plain = rollout(seed=3, empty_row=empty_row)
    lazy = stored(group, asked, plain.select())
    take_touched()
    assert is_lazy(lazy) and not is_lazy(plain)
    order = torch.tensor([3, 2, 0, 1, 7, 6, 4, 5])
    for data in (plain, lazy):
        data.reorder(order)
    if empty_row and name == "grpo_passk":
        pytest.skip("a single sample that is left has no second best: both refuse it in the same call")
    expected = agg_loss(plain.batch["entropys"], plain.batch["response_mask"], "seq-mean-token-mean").item()
    found = log_prob_metrics(lazy, lazy.batch["entropys"], "seq-mean-token-mean", None, group)
    assert found.pop("actor/entropy") == expected
    assert found == calculate_debug_metrics(plain)
    algorithm = AlgoConfig(
        adv_estimator=name, gamma=0.9, lam=0.8, kl_penalty="low_var_kl", rollout_is=True, rollout_is_threshold=1.05
    )
    results = [
        shaping.apply_kl_penalty(plain, FixedKLController(0.3), "low_var_kl")[1],
        shaping.apply_kl_penalty(lazy, FixedKLController(0.3), "low_var_kl", group)[1],
    ]
    assert results[0] == results[1]
    for level in ("sequence", "token"):
        chosen = AlgoConfig(**{**algorithm, "rollout_is_level": level})
        for data in (plain, lazy):
            data.batch.pop("rollout_is_weights", None)
        plain, expected = shaping.add_rollout_weights(plain, chosen)
        lazy, found = shaping.add_rollout_weights(lazy, chosen, group)
        assert found == expected
    config = OmegaConf.create({"norm_adv_by_std_in_grpo": True})
    plain = shaping.compute_advantage(plain, name, gamma=0.9, lam=0.8, config=config)
    before = group.calls
    lazy = shaping.compute_advantage(lazy, name, gamma=0.9, lam=0.8, config=config, group=group)
    assert group.calls == before + 1
    assert compute_data_metrics(lazy, group=group) == compute_data_metrics(plain)
    assert compute_timing_metrics(lazy, {"adv": 1.0, "gen": 2.0}) == compute_timing_metrics(
        plain, {"adv": 1.0, "gen": 2.0}
    )
    assert length_histogram(lazy) == length_histogram(plain)
    assert not take_touched(), "the driver has read a column"
    assert set(lazy_columns(lazy)) == {key for key, value in plain.batch.items() if value.dim() == 2}
    for key in lazy_columns(lazy):
        assert digest_of(lazy.batch[key]) == tensor_digest(plain.batch[key]), key
        backwards = list(range(len(plain)))[::-1]
        assert digest_of(lazy.batch[key], backwards) == tensor_digest(plain.batch[key][backwards])


@pytest.mark.parametrize(
    ("name", "row", "column", "value"),
    [("responses", 2, 0, 1), ("response_mask", 4, 0, 0), ("input_ids", 6, 1, 7), ("rollout_log_probs", 1, 0, 1.0)],
)
def test_a_wrong_rollout_is_refused_with_the_words_of_the_plain_check(
    name: str, row: int, column: int, value: float
) -> None:
    asked, batch = rollout(seed=1)
    batch.batch[name][row, column] = value
    with pytest.raises(RuntimeError) as plain:
        check_rollout(asked, batch, 1)
    with pytest.raises(RuntimeError) as lazy:
        stored(Group(), asked, batch)
    assert str(lazy.value) == str(plain.value)


def test_lengths_of_a_batch_that_is_not_described() -> None:
    _, batch = rollout(seed=1)
    lazy = by_reference(batch, put=copy.deepcopy)
    assert is_lazy(lazy)
    assert isinstance(lazy.batch["attention_mask"], LazyTensor)
    for found, expected in zip(lengths_of(lazy), lengths_of(batch), strict=True):
        assert found.tolist() == expected.tolist()


def test_a_response_mask_is_cleared_where_it_lies() -> None:
    group = Group()
    asked, plain = rollout(seed=3)
    lazy = stored(group, asked, plain.select())
    rows = torch.arange(len(plain)) % 3 == 1
    lazy.batch["reward_baselines"] = torch.where(rows, torch.nan, 0.0)  # their baselines could not be scored
    take_touched()
    leave_unscored_out(lazy, group, 1)
    assert is_lazy(lazy.select(["response_mask"])) and not take_touched()
    expected = plain.batch["response_mask"].masked_fill(rows.unsqueeze(-1), 0)
    assert torch.equal(fetched(lazy.select(["response_mask"])).batch["response_mask"], expected)


def test_a_formula_over_columns_that_this_process_has_asks_no_worker() -> None:
    """Columns that it has read, and those that it has written."""
    group = Group()
    _, plain = rollout(seed=3)
    lazy = by_reference(plain, put=copy.deepcopy)
    for name in ("token_level_scores", "old_log_probs", "ref_log_prob", "response_mask"):
        lazy.batch[name] += 0
    expected = shaping.apply_kl_penalty(plain, FixedKLController(0.3), "kl")[1]
    assert shaping.apply_kl_penalty(lazy, FixedKLController(0.3), "kl", group)[1] == expected and not group.calls
