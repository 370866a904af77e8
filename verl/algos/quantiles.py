"""Exact quantiles of what comes in blocks, without a copy of it and without a limit on its size."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[Any]

_MARGIN = 3.5
"""Standard deviations of a sampled rank by which a bracket is wider than its quantile; of 2000 one misses."""


class StreamedQuantiles:
    """Exact quantiles of a stream of blocks, in the memory of what lies near them.

    A small sample brackets each quantile beforehand. Every block is counted against the brackets, and what lies inside
    one is kept: the quantile is the element of a known rank among those. An empty sample brackets nothing, and so
    keeps all. By numpy: on a CPU its comparisons, counts and sorts of 32-bit numbers are several times as fast.

    Args: ``probabilities`` rise; ``sample`` is (m,).
    """

    def __init__(self, probabilities: Sequence[float], sample: Floats) -> None:
        self._probabilities = tuple(probabilities)
        self._brackets = _brackets(self._probabilities, np.sort(sample))
        self._below = [0] * len(self._brackets)
        self._kept: list[Floats] = []
        self._flags = np.empty((3, 0), dtype=bool)  # used again, lest each leave a hole between what is kept

    def add(self, block: Floats) -> None:
        """Take in a block of any shape, in which plus infinity stands for what is no element."""
        if self._flags.shape[1] < block.size:
            self._flags = np.empty((3, block.size), dtype=bool)
        values = block.ravel()
        kept, below, inside = self._flags[:, : block.size]
        kept[:] = False
        for number, (low, high) in enumerate(self._brackets):
            np.less(values, low, out=below)
            self._below[number] += int(np.count_nonzero(below))
            np.less(values, high, out=inside)
            inside ^= below
            kept |= inside
        self._kept.append(np.compress(kept, values))

    def result(self, count: int, transform: Callable[[Floats], Floats]) -> list[float] | None:
        """Return the quantiles of ``transform``, which must not fall, over the ``count`` elements that were added.

        Linear between the two elements next to it, as ``torch.quantile``; None when the sample has misled.
        """
        kept = np.sort(np.concatenate(self._kept))
        starts = [int(np.searchsorted(kept, kept.dtype.type(low))) for low, _ in self._brackets] + [len(kept)]
        found = []
        for probability in self._probabilities:
            position = probability * (count - 1)
            first, last = (self._place(rank, starts) for rank in (math.floor(position), math.ceil(position)))
            if first is None or last is None:
                return None
            low, high = transform(kept[[first, last]].astype(np.float64))
            found.append(float(low + (high - low) * (position - math.floor(position))))
        return found

    def _place(self, rank: int, starts: list[int]) -> int | None:
        """Return where the element of a rank of all stands among the kept ones."""
        for below, start, end in zip(self._below, starts[:-1], starts[1:], strict=True):
            if below <= rank < below + end - start:
                return start + rank - below
        return None


def _brackets(probabilities: Sequence[float], ordered: Floats) -> list[tuple[Any, Any]]:
    """Return disjoint half-open intervals, each around one or several quantiles of a sorted sample."""
    size, number = len(ordered), ordered.dtype.type
    found: list[tuple[Any, Any]] = []
    for probability in probabilities:
        rank = probability * (size - 1)
        margin = _MARGIN * math.sqrt(size * probability * (1 - probability)) + 2
        first, last = math.floor(rank - margin), math.ceil(rank + margin)
        low = ordered[first] if first >= 0 else number(-math.inf)
        high = np.nextafter(ordered[last], number(math.inf)) if last < size else number(math.inf)
        if found and low < found[-1][1]:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found


def weighted_quantiles(values: Floats, counts: NDArray[np.int64], probabilities: Sequence[float]) -> list[float]:
    """Return the quantiles of (N,) values that stand for ``counts`` (N,) equal elements each, at least one in all."""
    order = np.argsort(values)
    ordered, ends = values[order], np.cumsum(counts[order])
    found = []
    for probability in probabilities:
        position = probability * (int(ends[-1]) - 1)
        ranks = [math.floor(position), math.ceil(position)]
        low, high = ordered[np.searchsorted(ends, ranks, side="right")].tolist()
        found.append(low + (high - low) * (position - math.floor(position)))
    return found
