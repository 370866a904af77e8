"""Quantiles of repeated values are those of numpy on the whole."""

import numpy as np
import pytest

from verl.utils.numerics.quantiles import weighted_quantiles

LEVELS = (0.0, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def test_values_that_stand_for_several():
    rng = np.random.default_rng(1)
    values, counts = rng.standard_normal(50), rng.integers(0, 9, 50)
    wanted = np.quantile(np.repeat(values, counts), LEVELS)
    assert weighted_quantiles(values, counts, LEVELS) == pytest.approx(wanted)
