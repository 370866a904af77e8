"""Exact quantiles of a stream of blocks, without a copy of the data and without a limit on its size."""

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]

_MARGIN = 3.5
"""Width of a bracket in standard deviations of a sampled rank; about one bracket in 2000 misses its quantile."""


class StreamedQuantiles:
    """Exact quantiles of a stream of blocks; it stores only the elements near them.

    Plain form: ``numpy.quantile(transform(all elements), probabilities)``.

    A small sample gives a bracket around each quantile. For each block, the elements below each bracket are counted and
    the elements inside are kept; the quantile is then the element of a known rank among the kept ones. With an empty
    sample the bracket is the whole line, so all elements are kept. This uses numpy, whose comparisons, counts and sorts
    of 32-bit numbers are several times as fast as torch's on a CPU.

    Args: ``probabilities`` in ascending order; ``sample`` is (m,).
    """

    def __init__(self, probabilities: Sequence[float], sample: Floats) -> None:
        self._probabilities = tuple(probabilities)
        self._brackets = _brackets(self._probabilities, np.sort(sample))
        self._below = [0] * len(self._brackets)
        self._kept: list[Floats] = []
        # Reused: one allocation per block would fragment the memory of the kept elements.
        self._flags = np.empty((3, 0), dtype=bool)

    def add(self, block: Floats) -> None:
        """Add a block of any shape; `+inf` marks padding."""
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
        """Return the quantiles of ``transform``, which must be monotonic, over the ``count`` elements that were added.

        Interpolates linearly, as ``torch.quantile`` does. None when a quantile lies outside its bracket.
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
        """Return the position of the element with the given rank among the kept ones; None if it was not kept."""
        for below, start, end in zip(self._below, starts[:-1], starts[1:], strict=True):
            if below <= rank < below + end - start:
                return start + rank - below
        return None


def _brackets(probabilities: Sequence[float], ordered: Floats) -> list[tuple[np.floating, np.floating]]:
    """Return disjoint half-open intervals, each around one or several quantiles of a sorted sample."""
    size = len(ordered)
    number = ordered.dtype.type
    found: list[tuple[np.floating, np.floating]] = []
    for probability in probabilities:
        rank = probability * (size - 1)
        margin = _MARGIN * math.sqrt(size * probability * (1 - probability)) + 2
        first = math.floor(rank - margin)
        last = math.ceil(rank + margin)
        low = ordered[first] if first >= 0 else number(-math.inf)
        high = np.nextafter(ordered[last], number(math.inf)) if last < size else number(math.inf)
        if found and low < found[-1][1]:
            found[-1] = (found[-1][0], high)
        else:
            found.append((low, high))
    return found


def weighted_quantiles(values: Floats, counts: NDArray[np.int64], probabilities: Sequence[float]) -> list[float]:
    """Return the quantiles of (N,) values, each repeated ``counts`` (N,) times: ``quantile(repeat(values, counts))``.

    At least one count is positive.
    """
    order = np.argsort(values)
    ordered = values[order]
    ends = np.cumsum(counts[order])
    found = []
    for probability in probabilities:
        position = probability * (int(ends[-1]) - 1)
        ranks = [math.floor(position), math.ceil(position)]
        low, high = ordered[np.searchsorted(ends, ranks, side="right")].tolist()
        found.append(low + (high - low) * (position - math.floor(position)))
    return found
