"""Samples of a prompt go to one rank, and no mini-batch changes its members."""

import pytest
import torch

from verl.trainer.ppo.grouping import Groups, keep_groups


def test_by_hand():
    """Four groups of two rows on two ranks: the longest with the shortest."""
    groups = [0, 0, 1, 1, 2, 2, 3, 3]
    prompts, responses = [10, 10, 50, 50, 30, 30, 20, 20], [1] * 8
    placed = keep_groups([[0, 2, 4, 6], [1, 3, 5, 7]], Groups(groups, prompts, responses), stretch=4)
    assert placed == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_group_that_fits_nowhere_is_cut():
    """Three rows each on two ranks of four places, with a group of two."""
    groups = [0, 0, 0, 1, 1, 1, 2, 2]
    placed = keep_groups([[0, 1, 2, 3], [4, 5, 6, 7]], Groups(groups, [9] * 8, [1] * 8), stretch=4)
    assert placed == [[0, 1, 2, 6], [3, 4, 5, 7]]


@pytest.mark.parametrize("stretch", [2, 4, 8])
@pytest.mark.parametrize("seed", range(4))
def test_mini_batches_keep_their_members(seed, stretch):
    """In any order of the rows, with as few groups on two ranks as there can be."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(24, generator=generator).tolist()
    ranks = [order[:8], order[8:16], order[16:]]
    groups = [row // 4 for row in range(24)]
    lengths = torch.randint(1, 50, (24,), generator=generator).tolist()
    placed = keep_groups(ranks, Groups(groups, [20] * 24, lengths), stretch)
    for first in range(0, 8, stretch):
        before, after = ({row for part in each for row in part[first : first + stretch]} for each in (ranks, placed))
        assert before == after
    if stretch == 8:  # all groups are whole, so each is on one rank
        assert all(len({groups[row] for row in part}) == 2 for part in placed)
