"""Tokens that the policy did not sample take no time: estimators treat the others as if they stood alone."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.algos.aggregate import SHARE_COLUMN
from verl.algos.kl import FixedKLController
from verl.algos.names import ADV_ESTIMATORS
from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.segments import SEGMENT_COLUMN, SEGMENTS_COLUMN, SHARED_COLUMN, TRAJECTORY_COLUMN
from verl.trainer.ppo.shaping import apply_kl_penalty, compute_advantage
from verl.workers.rollout.base import DROPPED_COLUMN

GAMMA, LAM, BETA = 0.9, 0.8, 0.1
FLOATS = ("token_level_scores", "values", "old_log_probs", "ref_log_prob")
INDEX = ["a", "b", "a", "b"]


@st.composite
def plans(draw: st.DrawFn) -> list[list[list[tuple[int, int]]]]:
    """Draw for each trajectory its segments, each a list of (unsampled, sampled) numbers of tokens."""
    turn = st.tuples(st.integers(0, 5), st.integers(1, 4))
    return [draw(st.lists(st.lists(turn, min_size=1, max_size=3), min_size=1, max_size=3)) for _ in INDEX]


def packed(rows: list[tuple[Tensor, dict[str, Tensor]]]) -> dict[str, Tensor]:
    """Stack masks and columns of different lengths; behind the end are zeros in the masks, and NaN."""
    width = max(len(mask) for mask, _ in rows)
    batch = {
        "response_mask": torch.zeros(len(rows), width, dtype=torch.int64),
        "attention_mask": torch.zeros(len(rows), width, dtype=torch.int64),
        **{name: torch.full((len(rows), width), math.nan, dtype=torch.float64) for name in FLOATS},
    }
    for row, (mask, columns) in enumerate(rows):
        batch["response_mask"][row, : len(mask)] = mask
        batch["attention_mask"][row, : len(mask)] = 1
        for name, values in columns.items():
            batch[name][row, : len(mask)] = values
    batch["token_level_scores"].nan_to_num_(0.0)
    return batch


def estimated(name: str, batch: dict[str, Tensor], uids: list[str], columns: dict[str, np.ndarray]) -> list[Tensor]:
    """Return advantages and returns of the sampled tokens, row after row, after the KL penalty."""
    baselines = torch.tensor([float(ord(uid)) / 100 for uid in uids], dtype=torch.float64)
    data = DataProto.from_dict(
        {**batch, "reward_baselines": baselines}, {"uid": np.array(uids, dtype=object), **columns}
    )
    data, metrics = apply_kl_penalty(data, FixedKLController(BETA))
    data = compute_advantage(data, name, gamma=GAMMA, lam=LAM)
    mask = batch["response_mask"].bool()
    found = [tensors_of(data)[key] for key in ("advantages", "returns")]
    assert not any(each[~mask].any() for each in found)
    kl = torch.tensor(metrics["actor/reward_kl_penalty"], dtype=torch.float64)
    return [*(each[mask] for each in found), kl]


@pytest.mark.parametrize("name", ADV_ESTIMATORS)
@settings(max_examples=15, deadline=None, derandomize=True)
@given(plan=plans(), seed=st.integers(0, 999))
def test_they_change_no_sampled_token(name: str, plan: list[list[list[tuple[int, int]]]], seed: int) -> None:
    """Wherever they stand and whatever they hold, in one segment and in several, with a reward at each turn's end."""
    generator = torch.Generator().manual_seed(seed)
    alone, segments = [], []
    for segments_of_it in plan:
        parts: dict[str, list[Tensor]] = {key: [] for key in FLOATS}
        for turns in segments_of_it:
            masks: list[Tensor] = []
            columns: dict[str, list[Tensor]] = {key: [] for key in FLOATS}
            for unsampled, sampled in turns:
                masks += [torch.zeros(unsampled), torch.ones(sampled)]
                for key in FLOATS:
                    values = torch.randn(sampled, generator=generator, dtype=torch.float64)
                    if key == "token_level_scores":
                        values[:-1] = 0
                    foreign = 0.0 if key == "token_level_scores" else math.inf
                    columns[key] += [torch.full((unsampled,), foreign, dtype=torch.float64), values]
                    parts[key].append(values)
            masks.append(torch.zeros(1))  # a tool's answer ends the segment
            joined = {key: torch.cat([*each, torch.zeros(1)]) for key, each in columns.items()}
            segments.append((torch.cat(masks), joined))
        whole = {key: torch.cat(each) for key, each in parts.items()}
        alone.append((torch.ones(len(whole["values"])), whole))
    numbers = [len(each) for each in plan]
    source = [row for row, number in enumerate(numbers) for _ in range(number)]
    batch = packed(segments)
    tokens = batch["response_mask"].sum(-1).double()
    batch[SHARE_COLUMN] = tokens / tokens.new_zeros(len(plan)).index_add(0, torch.tensor(source), tokens)[source]
    columns_of_rows = {
        TRAJECTORY_COLUMN: np.array(source),
        SEGMENT_COLUMN: np.array([at for number in numbers for at in range(number)]),
        SEGMENTS_COLUMN: np.array([numbers[row] for row in source]),
        SHARED_COLUMN: np.zeros(len(source), dtype=bool),
        DROPPED_COLUMN: np.zeros(len(source), dtype=bool),
    }
    expected = estimated(name, packed(alone), INDEX, {})
    found = estimated(name, batch, [INDEX[row] for row in source], columns_of_rows)
    for one, two in zip(expected, found, strict=True):  # the order of the sums of whitening differs
        torch.testing.assert_close(two, one, rtol=1e-9, atol=1e-10)
