"""Reduction of metrics from several micro-batches or ranks."""

import re
from collections.abc import Callable, Mapping, Sequence

import numpy as np

_MAX = re.compile(r"(?<![a-z])(min)?max(imum)?(?![a-z])")
_MIN = re.compile(r"(?<![a-z])min(imum)?(?![a-z])")


def reduce_metrics(metrics: Mapping[str, float | Sequence[float]]) -> dict[str, float]:
    """Reduce every list of values: by maximum or minimum if the key contains that word, else by the mean.

    ``timing`` and ``minibatch`` do not contain the word ``min``.
    """
    return {key: float(_reducer(key)(values)) for key, values in metrics.items()}


def _reducer(key: str) -> Callable[[float | Sequence[float]], float]:
    if _MAX.search(key):
        return np.max
    return np.min if _MIN.search(key) else np.mean
