"""Quantiles of a stream and of repeated values are those of numpy on the whole."""

import numpy as np
import pytest

from verl.utils.numerics.quantiles import StreamedQuantiles, weighted_quantiles

LEVELS = (0.0, 0.25, 0.5, 0.75, 0.95, 0.99, 1.0)


def test_quantiles_of_a_stream_are_exact():
    rng = np.random.default_rng(0)
    for name, values in {
        "spread": rng.standard_normal(60_000),
        "ties": rng.integers(0, 4, 60_000).astype(float),
        "one value": np.zeros(60_000),
        "two far values": np.where(rng.random(60_000) < 0.5, -3.0, 3.0),
    }.items():
        values = values.astype(np.float32)
        stream = StreamedQuantiles(LEVELS, rng.choice(values, 6000))
        for part in np.array_split(values, 7):
            stream.add(np.concatenate([part, np.full(11, np.inf, np.float32)]))
        wanted = np.quantile(values.astype(np.float64), LEVELS).tolist()
        assert stream.result(60_000, lambda x: x) == pytest.approx(wanted, rel=1e-12), name
        if name == "spread":
            assert sum(map(len, stream._kept)) < 20_000


@pytest.mark.parametrize("size", [1, 2, 37])
def test_small_streams_are_kept_whole(size):
    values = np.random.default_rng(size).standard_normal(size).astype(np.float32)
    stream = StreamedQuantiles(LEVELS, values[:0])
    stream.add(values.reshape(1, -1))
    wanted = np.quantile(np.exp(values.astype(np.float64)), LEVELS)
    assert stream.result(size, np.exp) == pytest.approx(wanted)


def test_a_sample_from_elsewhere_gives_nothing():
    stream = StreamedQuantiles((0.25, 0.5), np.linspace(5, 6, 5000, dtype=np.float32))
    stream.add(np.linspace(0, 1, 5000, dtype=np.float32))
    assert stream.result(5000, lambda x: x) is None


def test_values_that_stand_for_several():
    rng = np.random.default_rng(1)
    values, counts = rng.standard_normal(50), rng.integers(0, 9, 50)
    wanted = np.quantile(np.repeat(values, counts), LEVELS)
    assert weighted_quantiles(values, counts, LEVELS) == pytest.approx(wanted)
