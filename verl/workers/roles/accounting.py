"""What a task of a role has used: the share of the device's peak, and memory."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import psutil

from verl.utils.device import get_torch_device, is_cuda_available, is_npu_available
from verl.utils.flops_counter import FlopsCounter

if TYPE_CHECKING:
    from verl.protocol import DataProto

_GIB = 1024**3
INFERENCE = 1 / 3
"""Passes that a forward pass alone counts for."""

_peaks = {"allocated": 0.0, "reserved": 0.0}
"""Largest device memory of this process in GiB before the current task, from which on the device counts anew."""


@contextmanager
def accounted(
    metrics: dict[str, Any], phase: str, data: "DataProto", passes: float, counter: FlopsCounter | None, ranks: int
) -> Iterator[None]:
    """Add what the enclosed ``passes`` over the batch use: ``perf/mfu/<phase>`` and ``perf/memory/<phase>/...``.

    MFU is that of all ``ranks`` together, from the lengths of the whole batch; without lengths there is none.
    """
    begin_peak()
    start = time.perf_counter()
    yield
    seconds = time.perf_counter() - start
    lengths = data.meta_info.get("global_token_num")
    if lengths and counter is not None:
        images, forward_only = data.meta_info.get("images_seqlens", ()), passes == INFERENCE
        seconds = seconds if forward_only else seconds / passes
        metrics[f"perf/mfu/{phase}"] = mfu(counter, lengths, seconds, ranks, images, forward_only)
    metrics.update(memory_of(phase))


def mfu(
    counter: FlopsCounter, lengths: Any, seconds: float, ranks: int, images: Any = (), forward_only: bool = False
) -> float:
    """Return the share of what ``ranks`` devices promise that one pass over sequences of these lengths reaches."""
    achieved, promised = counter.estimate_flops(lengths, seconds, images, forward_only)
    return achieved / promised / ranks


def begin_peak() -> None:
    """Let the peaks of the device begin anew, and keep those so far."""
    if is_cuda_available or is_npu_available:
        _keep_peaks()
        get_torch_device().reset_peak_memory_stats()


def _keep_peaks() -> None:
    device = get_torch_device()
    _peaks["allocated"] = max(_peaks["allocated"], device.max_memory_allocated() / _GIB)
    _peaks["reserved"] = max(_peaks["reserved"], device.max_memory_reserved() / _GIB)


def memory_of(phase: str) -> dict[str, float]:
    """Return, in GiB, the peaks of device memory since ``begin_peak`` and the resident memory of this process now."""
    figures = {"max_rss_gb": psutil.Process().memory_info().rss / _GIB}  # over the ranks
    if is_cuda_available or is_npu_available:
        device = get_torch_device()
        figures["max_allocated_gb"] = device.max_memory_allocated() / _GIB
        figures["max_reserved_gb"] = device.max_memory_reserved() / _GIB
    return {f"perf/memory/{phase}/{name}": value for name, value in figures.items()}


def memory_metrics() -> dict[str, float]:
    """Return, in GiB, the peaks of device memory since the start of this process, and the host memory in use."""
    metrics = {"perf/cpu_memory_used_gb": psutil.virtual_memory().used / _GIB}
    if is_cuda_available or is_npu_available:
        _keep_peaks()
        metrics["perf/max_memory_allocated_gb"] = _peaks["allocated"]
        metrics["perf/max_memory_reserved_gb"] = _peaks["reserved"]
    return metrics
