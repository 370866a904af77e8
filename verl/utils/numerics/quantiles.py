"""Quantiles of values that occur several times each."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.floating]


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
