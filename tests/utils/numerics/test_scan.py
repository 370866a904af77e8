"""The scan over time against a loop in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.utils.numerics.scan import reverse_scan


def loop(x, keep, decay):
    y = torch.zeros_like(x, dtype=torch.float64)
    following = y[:, 0]
    decays = torch.tensor([1.0, decay], dtype=torch.float64)
    for t in reversed(range(x.shape[1])):
        following = x[:, t].double() + decays[keep[:, t].long()] * following
        y[:, t] = following
    return y


def error(x, keep, decay):
    """Return the largest error where the result counts, over the largest sum of absolute terms."""
    counts = keep.clone()
    counts[:, 1:] |= keep[:, :-1]
    difference = reverse_scan(x, keep, decay) - loop(x, keep, decay)
    return (difference * counts).abs().max() / loop(x.abs(), keep, decay).max().clamp(min=1e-3)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 999),
    width=st.sampled_from([1, 5, 32, 33, 96, 160]),
    decay=st.sampled_from([0.0, 0.3, 0.95, 0.9999, 1.0]),
    kind=st.sampled_from(["all", "none", "prefix", "segments", "random"]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_equals_a_loop(seed, width, decay, kind, dtype):
    generator = torch.Generator().manual_seed(seed)
    position, rows = torch.arange(width), 6
    length = torch.randint(0, width + 1, (rows, 1), generator=generator)
    start = torch.randint(0, width, (rows, 1), generator=generator)
    keep = {
        "all": torch.ones(rows, width, dtype=torch.bool),
        "none": torch.zeros(rows, width, dtype=torch.bool),
        "prefix": position < length,
        "segments": (position < length) & ((position < start) | (position > start + 40)),
        "random": torch.rand(rows, width, generator=generator) < 0.7,
    }[kind]
    x = torch.where(keep, torch.randn(rows, width, generator=generator, dtype=dtype), 0.0)
    assert error(x, keep, decay) < (1e-6 if dtype == torch.float32 else 1e-14)


@pytest.mark.parametrize("decay", [0.9, 1.0])
def test_long_rows_stay_exact(decay):
    """4096 steps of sums that grow: no more than rounding of the largest one."""
    x = torch.rand(4, 4096, generator=torch.Generator().manual_seed(0))
    assert error(x, torch.ones(4, 4096, dtype=torch.bool), decay) < 1e-6
