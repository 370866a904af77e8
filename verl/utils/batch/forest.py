"""Prefix trees over the rows of a batch: tokens that several rows begin with, found once.

Rows share a token only where everything that the model sees up to it agrees, so callers compare *keys*: ids, positions
and, for the places of images, which image stands there.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

MIN_SHARED_TOKENS = 8
"""Shorter common beginnings are not worth a node, which needs a separate call of attention."""


@dataclass(frozen=True)
class Neighbours:
    """Rows ordered so that rows with a common prefix are neighbours.

    Attributes:
        order: the rows, (b,).
        shared: tokens that the row at each place begins with like the row before it, (b,); 0 at the first place.
        lengths: tokens of the row at each place, (b,).
    """

    order: np.ndarray
    shared: np.ndarray
    lengths: np.ndarray

    def own_tokens(self, min_shared: int = MIN_SHARED_TOKENS) -> np.ndarray:
        """Return an upper bound (b,) of the tokens that each row adds to a forest that ends with the row before it.

        A node ends less than ``min_shared`` tokens before the common beginning that it stands for.
        """
        return self.lengths - np.maximum(0, self.shared - min_shared + 1)


def cut_neighbours(found: Neighbours, max_tokens: int) -> list[tuple[int, int]]:
    """Cut the ordered rows into as few runs as possible of at most ``max_tokens`` distinct tokens and similar size.

    Returns: (first, last) of each run, the largest first: memory then peaks early.
    """
    own = found.own_tokens()
    lengths = found.lengths
    most = int(lengths.max())
    runs = _fill(own, lengths, max(max_tokens, most))
    # The number of runs is the smallest one by now. Of all limits that give this number, the smallest evens out the
    # runs.
    low = max(most, -(-int(own.sum()) // len(runs)))
    high = max(max_tokens, most)
    while low < high:  # bisection for the smallest limit with this number of runs
        middle = (low + high) // 2
        if len(_fill(own, lengths, middle)) > len(runs):
            low = middle + 1
        else:
            high = middle
    runs = _fill(own, lengths, low)
    sizes = {(first, last): int(lengths[first] + own[first + 1 : last].sum()) for first, last in runs}
    return sorted(sizes, key=lambda run: (-sizes[run], run))


def _fill(own: np.ndarray, lengths: np.ndarray, limit: int) -> list[tuple[int, int]]:
    """Cut the order where the next row would exceed the limit."""
    total = np.concatenate([[0], own.cumsum()])
    runs = []
    first = 0
    while first < len(own):
        # The first row of a run shares with none: it takes all its tokens.
        last = int(np.searchsorted(total, limit + total[first + 1] - lengths[first], side="right")) - 1
        last = min(max(last, first + 1), len(own))
        runs.append((first, last))
        first = last
    return runs


def neighbours(keys: Tensor, attended: Tensor) -> Neighbours:
    """Sort rows such that common beginnings are neighbours.

    Args: ``keys`` (b, L, C) are the model's inputs at each token, ``attended`` (b, L) marks the tokens.
    """
    held = attended.bool().cpu()
    lengths = held.sum(-1)
    width = int(lengths.max()) if len(lengths) else 0
    # Moves the tokens to the left in order, and the padding to the right.
    place = (~held).int().argsort(dim=-1, stable=True)[:, :width]
    left = keys.cpu().gather(1, place.unsqueeze(-1).expand(-1, -1, keys.shape[-1]))
    inside = torch.arange(width) < lengths.unsqueeze(1)
    rows = left.masked_fill(~inside.unsqueeze(-1), -1).numpy()
    # Equal tokens are equal bytes, so rows that begin alike are neighbours in the order of their bytes, whatever it is.
    texts = [row[:length].tobytes() for row, length in zip(rows, lengths.tolist(), strict=True)]
    order = np.array(sorted(range(len(texts)), key=texts.__getitem__), dtype=np.int64)
    counts = lengths.numpy()[order]
    shared = np.zeros(len(order), dtype=np.int64)
    if len(order) > 1 and width:
        ordered = rows[order]
        differs = (ordered[1:] != ordered[:-1]).any(-1)
        first = np.where(differs.any(-1), differs.argmax(-1), width)
        shared[1:] = np.minimum(first, np.minimum(counts[1:], counts[:-1]))
    return Neighbours(order, shared, counts)


@dataclass(frozen=True)
class Forest:
    """The distinct tokens of some rows: each root is a beginning, and each row a path from a root.

    Nodes are in depth-first order, so the tokens below a node follow its own: a token at place p sees the token at
    place q if ``q <= p < ends[q]``.

    Attributes:
        lengths: tokens of each node, all above 0.
        ends: for each node, the place after the last token below it.
        above: for each node, the tokens of the nodes above it.
        order: the rows, as their paths end in depth-first order.
        firsts: for each root, the first of the rows that begin there.
        place: the place of each attended token of the rows, row by row, (sum of the rows' lengths,).
    """

    lengths: list[int]
    ends: list[int]
    above: list[int]
    order: list[int]
    firsts: list[int]
    place: Tensor

    @property
    def num_tokens(self) -> int:
        """The distinct tokens."""
        return sum(self.lengths)


@dataclass
class _Node:
    """Tokens ``start:stop`` of the rows at places ``first:last`` of the sorted order."""

    start: int
    stop: int
    first: int
    last: int
    below: "list[_Node]"
    ending: list[int]
    size: int = 0


def forest_of(found: Neighbours, min_shared: int = MIN_SHARED_TOKENS) -> Forest:
    """Build the forest of rows.

    Args: a common beginning gets a node if it is ``min_shared`` tokens longer than the one that it lies in.
    """
    shared = found.shared
    lengths = found.lengths
    root = _Node(0, 0, 0, len(lengths), [], [])
    todo = [root]
    preorder = []
    while todo:
        node = todo.pop()
        preorder.append(node)
        for first, last in _parts(shared, node, min_shared):
            stop = int(lengths[first]) if last - first == 1 else int(shared[first + 1 : last].min())
            if stop == node.stop:  # a row that ends here
                node.ending += range(first, last)
                continue
            child = _Node(node.stop, stop, first, last, [], [])
            if last - first == 1:
                child.ending.append(first)
                preorder.append(child)
            else:
                todo.append(child)
            node.below.append(child)
    for node in reversed(preorder):  # children come after their parents
        node.size = node.stop - node.start + sum(each.size for each in node.below)
    return _laid_out(root, found)


def _parts(shared: np.ndarray, node: _Node, min_shared: int) -> list[tuple[int, int]]:
    """Split the rows below a node where neighbours share too few further tokens; rows that end in it stay alone."""
    cuts = np.flatnonzero(shared[node.first + 1 : node.last] < node.stop + min_shared) + node.first + 1
    bounds = [node.first, *cuts.tolist(), node.last]
    return [(first, last) for first, last in zip(bounds, bounds[1:], strict=False) if first < last]


def _laid_out(root: _Node, found: Neighbours) -> Forest:
    lengths: list[int] = []
    ends: list[int] = []
    order: list[int] = []
    count = len(found.order)
    paths: list[list[tuple[int, int]]] = [[] for _ in range(count)]  # (place, tokens) by row
    firsts: list[int] = []
    depths: list[int] = []
    at = 0
    todo: list[tuple[_Node, list[tuple[int, int]]]] = [(root, [])]
    while todo:
        node, above = todo.pop()
        path = above
        if node.stop > node.start:
            if not above:
                firsts.append(int(found.order[node.first]))
            lengths.append(node.stop - node.start)
            ends.append(at + node.size)
            depths.append(node.start)
            path = [*above, (at, node.stop - node.start)]
            at += node.stop - node.start
        for row in node.ending:
            order.append(int(found.order[row]))
            paths[order[-1]] = path
        # Similar lengths are neighbours, so that they are padded together; the stack takes the last one first.
        todo += [(child, path) for child in sorted(node.below, key=lambda each: -each.size)]
    # A token's place in the forest is the start of its node plus its position in it, for all rows at once.
    starts = torch.tensor([start for path in paths for start, _ in path], dtype=torch.long)
    sizes = torch.tensor([size for path in paths for _, size in path], dtype=torch.long)
    before = sizes.cumsum(0) - sizes
    place = torch.arange(int(sizes.sum())) + (starts - before).repeat_interleave(sizes)
    return Forest(lengths, ends, depths, order, firsts, place)


def token_keys(ids: Tensor, positions: Tensor, attended: Tensor, media: Tensor | None = None) -> Tensor:
    """Return the inputs of the model at each token, (b, L, C) int32.

    Positions that count the tokens of their row tell nothing more, and are left out.

    Args: ids (b, L), positions (b, L) or (b, A, L), attended (b, L), media (b, L) the number of the images of a row.
    """
    parts = [ids]
    if positions.dim() == 3:
        parts += positions.unbind(1)
    elif ((positions != attended.cumsum(-1) - 1) & attended.bool()).any():
        parts.append(positions)
    if media is not None:
        parts.append(media)
    return torch.stack([part.int() for part in parts], dim=-1)
