"""Memory of the device and the host: free it, measure it, and record allocations."""

import ctypes
import logging
import os
import pickle
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import psutil
import torch

from verl.utils.device import get_device_name, get_torch_device
from verl.utils.import_utils import lazy_exports

logger = logging.getLogger(__name__)

_FOR_FORKS = (
    "aggressive_empty_cache",
    "reset_memory_stats",
    "log_memory_usage",
    "optimize_memory_for_inference",
    "optimize_memory_for_training",
)
"""Helpers that only forks call."""
__getattr__ = lazy_exports(__name__, dict.fromkeys(_FOR_FORKS, "verl.compat.memory_utils"))

_GIB = 1024**3
_SHORT = 1 / 4
"""Memory of the host is short if less than this share of it is available."""
_STACKS = {"python": "python", "cpp": "all", "all": "all"}
"""torch records C++ frames only together with Python frames."""
Device = torch.device | str | int | None


def return_freed_host_memory() -> None:
    """Return freed host memory of this process to the system.

    glibc keeps freed blocks of up to 32 MiB. Small live blocks between them prevent their reuse for large tensors.
    """
    with suppress(OSError, TypeError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def return_freed_host_memory_if_short() -> None:
    """Return freed host memory to the system if it has little left; otherwise the next step uses it again."""
    memory = psutil.virtual_memory()
    if memory.available < _SHORT * memory.total:
        return_freed_host_memory()


@cache
def keep_freed_host_memory() -> bool:
    """Let this process keep freed host memory for reuse; return whether it does, since only glibc supports that.

    Otherwise each block above some MB comes from new pages, which the kernel clears. A process whose steps allocate and
    free the same large blocks then pays for this only once, but holds its peak memory until it ends or returns it.
    """
    trim_threshold, mmap_max = -1, -4  # M_TRIM_THRESHOLD and M_MMAP_MAX of malloc.h
    with suppress(OSError, TypeError, AttributeError):  # another C library
        libc = ctypes.CDLL(None)
        return bool(libc.mallopt(mmap_max, 0) and libc.mallopt(trim_threshold, -1))
    return False


def get_memory_info() -> dict[str, float]:
    """Return GiB of resident memory and, on an accelerator, allocated, reserved, used (by all processes) and total."""
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


def enable_memory_visualize(
    trace_alloc_max_entries: int = 200_000,
    stack_depth: int = 32,
    context: str | None = "all",
    stacks: str = "all",
    devices: Device | Sequence[Device] = None,
    record_context: bool = True,
    **options: Any,
) -> None:
    """Record the history of the allocator; https://pytorch.org/memory_viz shows its snapshots.

    Args:
        stack_depth: number of frames per allocation in a snapshot (see ``MemorySnapshotSampler``).
        devices: one device or several.
        record_context: whether to record stacks.

    Raises: RuntimeError without a CUDA device.
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


@dataclass(eq=False)
class MemorySnapshotSampler:
    """Write snapshots of the allocator to ``<out_dir>/<sub_dir or time>/<tag>_rank<r>_pid<p>.pickle``."""

    out_dir: str = "./memory_snapshots"
    tag: str = "torch_memory"
    rank: int = 0
    stack_depth: ClassVar[int | None] = None

    def dump_memory_snapshot(
        self, out_dir: str | None = None, tag: str | None = None, sub_dir: str | None = None
    ) -> str:
        """Write a snapshot and return its path.

        Raises: RuntimeError without a CUDA device.
        """
        _need_cuda()
        folder = Path(out_dir or self.out_dir, sub_dir or time.strftime("%Y%m%d-%H%M%S"))
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{tag or self.tag}_rank{self.rank}_pid{os.getpid()}.pickle"
        snapshot = torch.cuda.memory._snapshot()
        _cut_stacks(snapshot, self.stack_depth)
        part = path.with_name(f"{path.name}.part")
        try:
            with part.open("wb") as file:
                pickle.dump(snapshot, file)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        return str(path)


def _cut_stacks(snapshot: dict[str, Any], depth: int | None) -> None:
    """Keep the innermost frames of each stack; the full stacks would be most of a snapshot."""
    if depth is None:
        return
    blocks = [block for segment in snapshot.get("segments", ()) for block in segment.get("blocks", ())]
    events = [event for trace in snapshot.get("device_traces", ()) for event in trace]
    for entry in [*snapshot.get("segments", ()), *blocks, *events]:
        if "frames" in entry:
            entry["frames"] = entry["frames"][:depth]


def _need_cuda() -> None:
    if not torch.cuda.is_available():
        raise RuntimeError(
            "torch_memory records CUDA's allocator, but this process has no CUDA device: use "
            "global_profiler.tool=torch instead"
        )
