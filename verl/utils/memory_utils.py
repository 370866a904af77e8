"""Memory of the device and of the host: freeing it, measuring it, and recording who allocates it."""

import ctypes
import gc
import logging
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import psutil
import torch

from verl.utils.device import get_device_name, get_torch_device, set_expandable_segments

logger = logging.getLogger(__name__)

_GIB = 1024**3
_STACKS = {"python": "python", "cpp": "all", "all": "all"}
"""torch records frames of C++ only together with those of Python."""
TAG = "torch_memory"


def aggressive_empty_cache(force_sync: bool = True, max_retries: int = 3) -> None:
    """Return unused memory to the device, again until nothing more comes free."""
    if get_device_name() == "cpu":
        gc.collect()
        return
    device = get_torch_device()
    for _ in range(max_retries):
        before = device.memory_reserved()
        gc.collect()
        device.empty_cache()
        if force_sync:
            device.synchronize()
        if before - device.memory_reserved() < _GIB:
            return


def return_freed_host_memory() -> None:
    """Return to the system what this process has freed on the host; it does so itself only in part.

    glibc keeps freed tensors of up to 32 MiB, and where a small one that lives lies between them no large one fits in.
    """
    if (trim := _malloc_trim()) is not None:
        trim(0)


@cache
def _malloc_trim() -> Callable[[int], int] | None:
    """Return the function of glibc; other C libraries have none."""
    try:
        function: Callable[[int], int] | None = getattr(ctypes.CDLL(None), "malloc_trim", None)
    except (OSError, TypeError):
        return None
    return function


def reset_memory_stats() -> None:
    """Forget the peaks so far."""
    if get_device_name() != "cpu":
        get_torch_device().reset_peak_memory_stats()


def get_memory_info() -> dict[str, float]:
    """Return figures in GiB: resident memory of this process, and on an accelerator what is allocated, reserved, and
    in use by all processes.
    """
    figures = {"rss_gb": psutil.Process().memory_info().rss / _GIB}
    if get_device_name() == "cpu":
        return figures
    device = get_torch_device()
    free, total = device.mem_get_info()
    return {
        "allocated_gb": device.memory_allocated() / _GIB,
        "reserved_gb": device.memory_reserved() / _GIB,
        "used_gb": (total - free) / _GIB,
        "total_gb": total / _GIB,
        **figures,
    }


def log_memory_usage(stage: str = "current") -> None:
    """Log the memory of this process and its device."""
    logger.info("%s: %s", stage, ", ".join(f"{name}={value:.2f}" for name, value in get_memory_info().items()))


def optimize_memory_for_inference() -> None:
    """Make room for an engine that allocates in large pieces, and cannot do so from growing segments."""
    set_expandable_segments(False)
    aggressive_empty_cache()


def optimize_memory_for_training() -> None:
    """Let segments grow, and free what an engine has left."""
    set_expandable_segments(True)
    aggressive_empty_cache(force_sync=False)


def enable_memory_visualize(
    trace_alloc_max_entries: int = 200_000,
    stack_depth: int = 32,
    context: str | None = "all",
    stacks: str = "all",
    devices: Any = None,
    record_context: bool = True,
    **options: Any,
) -> None:
    """Record the history of the allocator; https://pytorch.org/memory_viz shows its snapshots.

    Args: ``stack_depth`` is the number of frames that a snapshot keeps of each allocation (see
    ``MemorySnapshotSampler``); ``devices`` is one device or several; without ``record_context`` no stacks are recorded.

    Raises: RuntimeError where there is no CUDA device.
    """
    _need_cuda()
    history = {
        "enabled": "all",
        "context": context if record_context else None,
        "stacks": _STACKS[stacks],
        "max_entries": trace_alloc_max_entries,
        **options,
    }
    MemorySnapshotSampler.stack_depth = stack_depth
    for device in devices if isinstance(devices, list | tuple) else [devices]:
        torch.cuda.memory._record_memory_history(device=device, **history)


class MemorySnapshotSampler:
    """Writes snapshots of the allocator, ``<out_dir>/<sub_dir, or the time>/<tag>_rank<r>_pid<p>.pickle``."""

    stack_depth: int | None = None

    def __init__(self, out_dir: str = "./memory_snapshots", tag: str = TAG, rank: int = 0) -> None:
        self.out_dir, self.tag, self.rank = out_dir, tag, rank

    def dump_memory_snapshot(
        self, out_dir: str | None = None, tag: str | None = None, sub_dir: str | None = None
    ) -> str:
        """Write a snapshot and return its path.

        Raises: RuntimeError where there is no CUDA device.
        """
        _need_cuda()
        folder = Path(out_dir or self.out_dir, sub_dir or time.strftime("%Y%m%d-%H%M%S"))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{tag or self.tag}_rank{self.rank}_pid{os.getpid()}.pickle"
        snapshot = torch.cuda.memory._snapshot()
        _cut_stacks(snapshot, self.stack_depth)
        _write_pickle(snapshot, path)
        return str(path)


def _cut_stacks(snapshot: dict[str, Any], depth: int | None) -> None:
    """Keep the innermost frames of each stack: torch records all of them, which is most of a snapshot."""
    if depth is None:
        return
    blocks = [block for segment in snapshot.get("segments", ()) for block in segment.get("blocks", ())]
    events = [event for trace in snapshot.get("device_traces", ()) for event in trace]
    for entry in [*snapshot.get("segments", ()), *blocks, *events]:
        if "frames" in entry:
            entry["frames"] = entry["frames"][:depth]


def _write_pickle(snapshot: dict[str, Any], path: Path) -> None:
    import pickle

    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as file:
            pickle.dump(snapshot, file)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "torch_memory records the allocator of CUDA, and this process has no CUDA device: profile with "
            "global_profiler.tool=torch instead"
        )
