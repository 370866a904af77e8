"""Measure a task of a role: model FLOPs utilisation (MFU) and memory."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil

from verl.utils.device import get_torch_device, is_cuda_available, is_npu_available
from verl.utils.flops_counter import FlopsCounter
from verl.workers.roles.batching import BatchInfo

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.engine import BaseEngine

_GIB = 1024**3
INFERENCE = 1 / 3
"""A forward pass alone, as a fraction of a forward and backward pass."""

_peaks = {"allocated": 0.0, "reserved": 0.0}
"""Largest device memory of this process in GiB before the current task, for which the device's peaks were reset."""


@contextmanager
def accounted(
    metrics: dict[str, float],
    phase: str,
    data: "DataProto",
    passes: float,
    counter: FlopsCounter | None,
    ranks: int,
    engine: "BaseEngine | None" = None,
) -> Iterator[None]:
    """Measure the enclosed ``passes`` over the batch: add ``perf/mfu/<phase>`` and ``perf/memory/<phase>/...``.

    MFU is that of all ``ranks`` together, from the lengths of the whole batch; without lengths it is left out. Images
    count as often as the vision tower of the ``engine`` computes them on this rank, as if all ranks had as many. If the
    engine shares prefixes, tokens count in the same way, and ``perf/computed_tokens/<phase>`` is their number in one
    pass over the whole batch.
    """
    begin_peak()
    if engine is not None:
        engine.take_segments()
        engine.take_images()
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    info = BatchInfo.of(data)
    forward_only = passes == INFERENCE
    rounds = 1 if forward_only else round(passes)
    lengths, images = (list(each) * rounds for each in (info.token_counts, info.image_lengths))
    shared: list[int] = []
    if engine is not None:
        shards = engine.get_data_parallel_size()
        if segments := engine.take_segments():
            lengths, shared = (list(each) * shards for each in zip(*segments, strict=True))
            metrics[f"perf/computed_tokens/{phase}"] = (sum(lengths) - sum(shared)) / rounds
        if (computed := engine.take_images()) is not None:
            images = computed * shards
    if lengths and counter is not None:
        metrics[f"perf/mfu/{phase}"] = mfu(counter, lengths, seconds, ranks, images, forward_only, shared)
    metrics.update(memory_of(phase))


def mfu(
    counter: FlopsCounter,
    lengths: Sequence[int],
    seconds: float,
    ranks: int,
    images: Sequence[int] = (),
    forward_only: bool = False,
    shared: Sequence[int] = (),
) -> float:
    """Return the MFU of ``ranks`` devices that pass over sequences of these lengths.

    Args: shared are the tokens of each sequence that another one has computed; by default none.
    """
    achieved, promised = counter.estimate_flops(lengths, seconds, images, forward_only, shared)
    return achieved / promised / ranks


def begin_peak() -> None:
    """Reset the peaks of the device, and keep the earlier ones for ``memory_metrics``."""
    if _device_peaks():
        _keep_peaks()
        get_torch_device().reset_peak_memory_stats()


def _device_peaks() -> dict[str, float]:
    """Return the peaks of device memory in GiB since they were reset; empty on a CPU."""
    if not (is_cuda_available or is_npu_available):
        return {}
    device = get_torch_device()
    return {"allocated": device.max_memory_allocated() / _GIB, "reserved": device.max_memory_reserved() / _GIB}


def _keep_peaks() -> None:
    for name, peak in _device_peaks().items():
        _peaks[name] = max(_peaks[name], peak)


def memory_in_use() -> dict[str, float]:
    """Return the memory of this process in GiB: ``host_gb``, and ``device_gb`` on an accelerator."""
    memory = {"host_gb": psutil.Process().memory_info().rss / _GIB}
    if is_cuda_available or is_npu_available:
        memory["device_gb"] = get_torch_device().memory_allocated() / _GIB
    return memory


def memory_of(phase: str) -> dict[str, float]:
    """Return, in GiB, the peaks of device memory since ``begin_peak`` and the resident memory of this process now."""
    # The names begin with max, since the driver reduces them by the maximum over ranks.
    figures = {"max_rss_gb": psutil.Process().memory_info().rss / _GIB}
    figures |= {f"max_{name}_gb": peak for name, peak in _device_peaks().items()}
    return {f"perf/memory/{phase}/{name}": value for name, value in figures.items()}


def memory_metrics() -> dict[str, float]:
    """Return, in GiB, the peaks of device memory since the start of this process, and the host memory in use."""
    _keep_peaks()
    host = {"perf/cpu_memory_used_gb": psutil.virtual_memory().used / _GIB}
    if not _device_peaks():
        return host
    return host | {
        "perf/max_memory_allocated_gb": _peaks["allocated"],
        "perf/max_memory_reserved_gb": _peaks["reserved"],
    }
