"""Buckets: what is in them, in which order, and what is alive."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.workers.rollout import tiny
from verl.workers.sharding_manager import build_sharding_manager
from verl.workers.sharding_manager.weight_sync import Bucketer, Meter


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), max_size=30), st.integers(1, 60))
def test_buckets_keep_the_order_and_the_limit(sizes: list[int], limit: int) -> None:
    buckets: list[list[tuple[str, int]]] = []
    bucketer = Bucketer(limit, lambda bucket: buckets.append([(name, tensor.nbytes) for name, tensor in bucket]))
    for index, size in enumerate(sizes):
        bucketer.add(f"w{index}", torch.zeros(size, dtype=torch.int8))
    bucketer.flush()
    assert [pair for bucket in buckets for pair in bucket] == [(f"w{i}", size) for i, size in enumerate(sizes)]
    for bucket, following in zip(buckets, [*buckets[1:], []], strict=False):
        total = sum(size for _, size in bucket)
        assert total <= limit or len([size for _, size in bucket if size]) == 1
        if following:
            assert total + following[0][1] > limit  # a bucket is only closed when the next tensor does not fit


@pytest.mark.parametrize(("told", "peak"), [(True, 40), (False, 50)])
def test_one_bucket_is_alive_at_a_time(told: bool, peak: int) -> None:
    """Told of a tensor before it is made, a bucketer gives up what is in its way."""
    meter, loaded = Meter(), []

    def load(bucket: list[tuple[str, torch.Tensor]]) -> None:
        loaded.append([name for name, _ in bucket])

    bucketer = Bucketer(40, load)
    for index in range(20):
        if told:
            bucketer.make_room(10)
        tensor = torch.zeros(10, dtype=torch.int8)
        meter.watch(tensor)
        bucketer.add(f"w{index}", tensor)
        del tensor
    bucketer.flush()
    bucketer.flush()
    assert [len(names) for names in loaded] == [4] * 5
    assert (meter.tensors, meter.total_bytes, meter.peak_bytes) == (20, 200, peak)


def test_a_bucket_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        Bucketer(0, list)


@pytest.mark.parametrize("bucket_bytes", [8 << 10, 100 << 10, 1 << 20])
def test_a_sync_holds_a_bucket_or_the_largest_tensor(tmp_path: Path, bucket_bytes: int) -> None:
    """Never both: the bucket is handed on before the tensor that does not fit is gathered."""
    model = tiny.build_model(tied=True)
    manager = build_sharding_manager(tiny.TrainerStandIn(model), tiny.start_rollout("hf", model, tmp_path))
    manager.bucket_bytes = bucket_bytes
    tiny.disturb(model, 0.2, seed=11)
    with manager:
        held = dict(manager.rollout.module.named_parameters())
    assert all(torch.equal(held[name], parameter) for name, parameter in model.named_parameters())
    sizes = [parameter.nbytes for parameter in model.parameters()]
    assert manager.last_sync["bytes"] == sum(sizes) and manager.last_sync["checksum_ok"] == 1
    assert max(sizes) <= manager.last_sync["peak_bytes"] <= max(bucket_bytes, *sizes)
