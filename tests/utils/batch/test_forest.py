"""Rows of a batch become a forest that holds exactly their distinct beginnings."""

import numpy as np
import pytest
import torch
from torch import Tensor

from verl.utils.batch.forest import Forest, Neighbours, cut_neighbours, forest_of, neighbours, token_keys


def rows_of(texts: list[list[int]], width: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Pad rows on both sides; returns ids, attended, positions."""
    longest = max([width, *map(len, texts)])
    ids = torch.zeros(len(texts), longest + 3, dtype=torch.long)
    held = torch.zeros_like(ids, dtype=torch.bool)
    for row, text in enumerate(texts):
        first = row % 3  # padding on the left differs by row
        ids[row, first : first + len(text)] = torch.tensor(text, dtype=torch.long)
        held[row, first : first + len(text)] = True
    return ids, held, (held.cumsum(-1) - 1).clamp(min=0)


def build(texts: list[list[int]], min_shared: int = 1) -> tuple[Forest, Tensor, Tensor]:
    ids, held, positions = rows_of(texts)
    return forest_of(neighbours(token_keys(ids, positions, held), held), min_shared), ids, held


def test_by_hand() -> None:
    """Two branches below a shared beginning, one of which goes on as a row and below another; a row that is alone."""
    texts = [[1, 2, 3, 4], [1, 2, 5], [7], [1, 2, 3], [1, 2, 3, 6, 6]]
    forest, ids, held = build(texts)
    # 7 | 1 2 | 5 | 3 | 4 | 6 6, shorter subtrees first
    assert forest.lengths == [1, 2, 1, 1, 1, 2]
    assert forest.ends == [1, 8, 4, 8, 6, 8]
    assert forest.order == [2, 1, 3, 0, 4]
    assert [part.tolist() for part in forest.place.split([4, 3, 1, 3, 5])] == [
        [1, 2, 4, 5], [1, 2, 3], [0], [1, 2, 4], [1, 2, 4, 6, 7],
    ]  # fmt: skip


def random_texts(seed: int, count: int, depth: int) -> list[list[int]]:
    """Walk down a random tree of segments, so that rows share beginnings of several lengths."""
    generator = torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=generator))

    texts: list[list[int]] = [[]]
    for _ in range(depth):
        grown = [[*text, *(draw(0, 3) for _ in range(draw(0, 9)))] for text in texts for _ in range(draw(1, 4))]
        texts = (grown + texts[:1])[: count * 2]
    return texts[:count]


@pytest.mark.parametrize("min_shared", [1, 3, 8])
@pytest.mark.parametrize("seed", range(20))
def test_random_rows(seed: int, min_shared: int) -> None:
    """Rows share places exactly where they begin alike, and see only their own tokens."""
    texts = random_texts(seed, count=12, depth=5)
    forest, ids, held = build(texts, min_shared)
    place = torch.full(ids.shape, -1)
    place[held] = forest.place
    token: dict[int, tuple[int, ...]] = {}
    for row, text in enumerate(texts):
        places = place[row][held[row]].tolist()
        assert places == sorted(set(places))
        for at, where in enumerate(places):
            beginning = tuple(text[: at + 1])
            assert token.setdefault(where, beginning) == beginning
    assert len(token) == forest.num_tokens
    assert sorted(forest.order) == list(range(len(texts)))
    if min_shared == 1:  # then nothing is held twice
        assert forest.num_tokens == len({tuple(text[: at + 1]) for text in texts for at in range(len(text))})
    ends = torch.tensor(forest.ends).repeat_interleave(torch.tensor(forest.lengths))
    for row in range(len(texts)):
        places = place[row][held[row]]
        if len(places):
            last = int(places[-1])
            seen = [at for at in range(last + 1) if last < int(ends[at])]
            assert seen == places.tolist()


def test_positions_and_images_tell_rows_apart() -> None:
    ids, held, positions = rows_of([[1, 2, 3], [1, 2, 3]])
    assert forest_of(neighbours(token_keys(ids, positions, held), held), 1).num_tokens == 3
    assert token_keys(ids, positions, held).shape[-1] == 1  # they count the tokens
    shifted = positions + torch.tensor([[0], [1]])
    assert forest_of(neighbours(token_keys(ids, shifted, held), held), 1).num_tokens == 6
    axes = positions.unsqueeze(1).repeat(1, 3, 1)
    axes[1, 2, -1] += 1  # nothing, since it is padding
    assert forest_of(neighbours(token_keys(ids, axes, held), held), 1).num_tokens == 3
    media = torch.where(ids == 2, torch.tensor([[0], [1]]), -1)
    assert forest_of(neighbours(token_keys(ids, positions, held, media), held), 1).num_tokens == 5


def test_rows_without_tokens() -> None:
    forest, _, _ = build([[], [4, 5], []])
    assert forest.lengths == [2] and forest.place.tolist() == [0, 1] and sorted(forest.order) == [0, 1, 2]
    assert build([[], []])[0].lengths == []


def test_unique_tokens_of_neighbours() -> None:
    ids, held, positions = rows_of([[1, 2, 3, 4], [9], [1, 2, 3, 5, 6]])
    found = neighbours(token_keys(ids, positions, held), held)
    own = dict(zip(found.order.tolist(), found.own_tokens(min_shared=1).tolist(), strict=True))
    assert own in ({0: 4, 1: 1, 2: 2}, {0: 1, 1: 1, 2: 5})
    assert found.own_tokens(min_shared=4).sum() == 10  # three shared tokens are too few


def test_runs_of_neighbours() -> None:
    """Four groups with prompts of 1,000 tokens and five samples of 100: two runs of 3,100 tokens hold them."""
    found = Neighbours(np.arange(20), np.array([0, 1000, 1000, 1000, 1000] * 4), np.full(20, 1100))
    assert sorted(cut_neighbours(found, 3100)) == [(0, 10), (10, 20)]
    uneven = sorted(cut_neighbours(found, 2600))
    assert [row for first, last in uneven for row in range(first, last)] == list(range(20))
    tokens = [1000 * len({row // 5 for row in range(first, last)}) + 100 * (last - first) for first, last in uneven]
    assert len(uneven) == 4 and max(tokens) == 1500  # a further row of another group would need 1,100
    assert cut_neighbours(found, 10**6) == [(0, 20)]
    assert len(cut_neighbours(found, 1)) == 20  # a row is never cut
