"""Buckets: what is in them, in which order, and what is alive."""

import gc
import weakref
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from verl.workers.sharding_manager.bucket import Meter, iter_buckets


def stream(sizes: list[int]) -> Iterator[tuple[str, Tensor]]:
    for index, size in enumerate(sizes):
        yield f"w{index}", torch.zeros(size, dtype=torch.int8)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60))
def test_buckets_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    buckets = [[(name, tensor.nbytes) for name, tensor in bucket] for bucket in iter_buckets(stream(sizes), limit)]
    assert [pair for bucket in buckets for pair in bucket] == [(f"w{i}", size) for i, size in enumerate(sizes)]
    for bucket, following in zip(buckets, [*buckets[1:], []], strict=False):
        total = sum(size for _, size in bucket)
        assert total <= limit or len([size for _, size in bucket if size]) == 1
        if following:
            assert total + following[0][1] > limit  # a bucket is only closed when the next tensor does not fit


def test_one_bucket_is_alive_at_a_time() -> None:
    alive: set[int] = set()
    peak = 0

    def counted() -> Iterator[tuple[str, Tensor]]:
        nonlocal peak
        for index in range(20):
            tensor = torch.zeros(10, dtype=torch.int8)
            alive.add(index)
            weakref.finalize(tensor, alive.discard, index)
            peak = max(peak, len(alive))
            yield f"w{index}", tensor
            del tensor

    meter = Meter()
    gc.disable()
    try:
        count = sum(1 for _ in iter_buckets(meter.watch(counted()), 40))
    finally:
        gc.enable()
    assert count == 5
    assert peak == 5  # a bucket of four, and the tensor that did not fit
    assert (meter.tensors, meter.total_bytes, meter.peak_bytes) == (20, 200, 50)


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        next(iter_buckets(stream([1]), 0))
