"""Partitions: complete, balanced, fast, and within the token budget."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl.utils import seqlen_balancing as sb


def spread(lengths, parts):
    totals = [sum(lengths[i] for i in part) for part in parts]
    return max(totals) - min(totals)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("n, k", [(8, 8), (64, 4), (128, 16), (96, 7), (4096, 64), (10, 3)])
def test_partitions(n, k, equal_size):
    lengths = np.random.default_rng(n + k).integers(1, 4096, n).tolist()
    if equal_size and n % k:
        for partition in (sb.get_seqlen_balanced_partitions, sb.greedy_partition):
            with pytest.raises(ValueError, match="do not divide into"):
                partition(lengths, k, True)
        return
    for partition in (sb.get_seqlen_balanced_partitions, sb.karmarkar_karp, sb.greedy_partition):
        parts = partition(lengths, k, equal_size)
        assert len(parts) == k and all(parts)
        assert sorted(i for part in parts for i in part) == list(range(n))
        if equal_size:
            assert {len(part) for part in parts} == {n // k}
    balanced = sb.get_seqlen_balanced_partitions(lengths, k, equal_size)
    assert all(part == sorted(part) for part in balanced)
    assert balanced == sb.get_seqlen_balanced_partitions(lengths, k, equal_size), "must not depend on chance"
    if n >= 8 * k:
        assert spread(lengths, balanced) <= (1 if n >= 64 * k else 0.001 * sum(lengths) / k)
    assert spread(lengths, balanced) <= spread(lengths, parts) or n < 8 * k


def test_differencing_by_hand():
    """The textbook case 8 7 6 5 4: the method leaves 16 against 14, and an exchange finds the perfect split."""
    parts = sb.karmarkar_karp([8, 7, 6, 5, 4], 2, equal_size=False)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]
    assert spread([8, 7, 6, 5, 4], sb.get_seqlen_balanced_partitions([8, 7, 6, 5, 4], 2, False)) == 0


def test_skewed_lengths_stay_as_balanced_as_they_can():
    lengths = [10_000] + [10] * 63
    parts = sb.get_seqlen_balanced_partitions(lengths, 4, equal_size=False)
    totals = sorted(sum(lengths[i] for i in part) for part in parts)
    assert totals == [210, 210, 210, 10_000]
    assert spread([0] * 9, sb.get_seqlen_balanced_partitions([0] * 9, 3, False)) == 0
    with pytest.raises(ValueError, match="3 sequences cannot be split into 4"):
        sb.get_seqlen_balanced_partitions([1, 2, 3], 4, False)


@pytest.mark.parametrize("equal_size", [True, False])
@pytest.mark.parametrize("kind", ["uniform", "exponential", "clipped", "alike"])
def test_any_lengths_differ_by_a_token(kind, equal_size):
    rng = np.random.default_rng(1)
    lengths = {
        "uniform": rng.integers(1, 8193, 4096),
        "exponential": np.minimum(rng.exponential(1000, 4096).astype(int) + 1, 8192),
        "clipped": np.minimum(rng.integers(1, 4097, 4096), 2048),
        "alike": np.where(np.arange(4096) < 7, 513, 512),
    }[kind].tolist()
    assert spread(lengths, sb.get_seqlen_balanced_partitions(lengths, 64, equal_size)) <= 1


def test_unbalance_metrics():
    metrics = sb.log_seqlen_unbalance([4, 3, 2, 1], [[0, 3], [1, 2]], "global_seqlen")
    assert metrics == {
        "global_seqlen/min": 3,
        "global_seqlen/max": 7,
        "global_seqlen/minmax_diff": 4,
        "global_seqlen/balanced_min": 5,
        "global_seqlen/balanced_max": 5,
        "global_seqlen/mean": 5,
    }


def padded_batch(lengths, width):
    mask = (torch.arange(width) < torch.tensor(lengths).unsqueeze(-1)).long()
    return TensorDict({"attention_mask": mask, "row": torch.arange(len(lengths))}, batch_size=len(lengths))


@pytest.mark.parametrize("budget", [100, 130, 1000])
def test_micro_batches_keep_the_budget_and_restore(budget):
    lengths = np.random.default_rng(budget).integers(1, 100, 40).tolist()
    batch = padded_batch(lengths, 100)
    micro_batches, parts = sb.rearrange_micro_batches(batch, budget)
    totals = [int(m["attention_mask"].sum()) for m in micro_batches]
    assert max(totals) <= budget and len(totals) >= sum(lengths) / budget
    squares = [sum(lengths[i] ** 2 for i in part) for part in parts]
    assert squares == sorted(squares, reverse=True)
    rows = torch.cat([m["row"] for m in micro_batches])
    assert sb.restore_dynamic_batch(rows, parts).tolist() == list(range(40))
    data = SimpleNamespace(batch=batch, select_idxs=lambda part: batch["row"][part].tolist())
    assert sb.prepare_dynamic_batch(data, budget)[0] == parts


def test_micro_batch_counts_and_refusals():
    batch = padded_batch([5, 5, 5, 5, 5, 5], 5)
    assert len(sb.rearrange_micro_batches(batch, 100)[0]) == 1
    assert len(sb.rearrange_micro_batches(batch, 100, min_num_micro_batch=3)[0]) == 3
    assert len(sb.rearrange_micro_batches(batch, 10, num_batches_divided_by=2)[0]) == 4
    for kind in (ValueError, AssertionError):
        with pytest.raises(kind, match="below the longest padded row, 5 tokens"):
            sb.rearrange_micro_batches(batch, 4)
    with pytest.raises(ValueError, match="6 rows cannot make 8"):
        sb.rearrange_micro_batches(batch, 5, num_batches_divided_by=4)
    with pytest.raises(TypeError, match="unexpected keyword"):
        sb.prepare_dynamic_batch(SimpleNamespace(batch=batch), 10, group=None)
    with pytest.raises(ValueError, match="4 indices cannot restore 3 rows"):
        sb.restore_dynamic_batch(torch.zeros(3), [[0, 1], [2, 3]])


def test_nested_batch():
    ids = torch.nested.nested_tensor([torch.ones(3), torch.ones(5), torch.ones(2)], layout=torch.jagged)
    batch = TensorDict({"input_ids": ids}, batch_size=3)
    lengths, width = sb._sequence_lengths(batch)
    assert (lengths, width) == ([3, 5, 2], 5)


def test_reverse_index():
    assert sb.get_reverse_idx([2, 0, 1]) == [1, 2, 0]
    assert sb.ceildiv(7, 3) == 3 and sb.roundup_divisible(7, 4) == 8
