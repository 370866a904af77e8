"""Reduction of metrics that came in several pieces."""

import re
from collections.abc import Mapping
from typing import Any

import numpy as np

_MAX = re.compile(r"(?<![a-z])(min)?max(imum)?(?![a-z])")
_MIN = re.compile(r"(?<![a-z])min(imum)?(?![a-z])")


def reduce_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Reduce every list of values to one: by the maximum or minimum where the key has that word, else by the mean.

    ``timing`` and ``minibatch`` do not have the word ``min``.
    """
    return {key: float(_reducer(key)(values)) for key, values in metrics.items()}


def _reducer(key: str) -> Any:
    if _MAX.search(key):
        return np.max
    return np.min if _MIN.search(key) else np.mean
