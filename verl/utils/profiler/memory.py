"""Log memory around calls, and record the history of CUDA's caching allocator."""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from verl.utils.memory_utils import MemorySnapshotSampler, enable_memory_visualize, get_memory_info
from verl.utils.profiler.captures import Tool, make_save_folder
from verl.utils.profiler.config import TorchMemoryToolConfig

P = ParamSpec("P")
T = TypeVar("T")


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Log allocated, reserved and used memory in GiB on one rank, or on all ranks with ``rank=None``."""
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is not None and initialized and torch.distributed.get_rank() != rank:
        return
    logger = logger or logging.getLogger(__name__)
    if not logger.isEnabledFor(level):
        return
    figures = ", ".join(f"{name} {value:.2f}" for name, value in get_memory_info().items())
    logger.log(level, "%s, memory in GiB: %s", head, figures)


@dataclass
class GPUMemoryLogger:
    """Decorator that logs memory before and after each call."""

    role: str
    logger: logging.Logger | None = None
    level: int = logging.DEBUG
    log_only_rank_0: bool = True

    def __call__(self, func: Callable[P, T]) -> Callable[P, T]:
        """Decorate a function."""

        @functools.wraps(func)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            name = f"{self.role} {func.__name__}"
            rank = 0 if self.log_only_rank_0 else None
            log_gpu_memory_usage(f"before {name}", self.logger, self.level, rank)
            result = func(*args, **kwargs)
            log_gpu_memory_usage(f"after {name}", self.logger, self.level, rank)
            return result

        return call


# ---- snapshots of the allocator

_recording: list[bool] = []
_written: set[tuple[str, str]] = set()


class TorchMemoryProfiler(Tool):
    """Records the allocator's history from construction on and writes a snapshot at the end of each step.

    Tasks are not marked, because the history holds the lines that allocate.
    """

    def __init__(self, options: TorchMemoryToolConfig, save_path: str | None, role: str, rank: int) -> None:
        super().__init__(options, save_path, role, rank)
        self.sampler = MemorySnapshotSampler(str(make_save_folder(save_path)), rank=rank)
        self._step = ""
        if not _recording:  # the process has one history, whatever the number of its roles
            enable_memory_visualize(
                trace_alloc_max_entries=options.trace_alloc_max_entries,
                stack_depth=options.stack_depth,
                context=options.context,
                stacks=options.stacks,
                **options.kw_args,
            )
            _recording.append(True)

    def start(self, role: str | None = None, profile_step: int | str | None = None) -> None:
        """Begin a step."""
        self._step = f"step{profile_step}"

    def stop(self) -> None:
        """Write the snapshot of the process, unless another of its roles already did for this step."""
        if (self.sampler.out_dir, self._step) not in _written:
            _written.add((self.sampler.out_dir, self._step))
            self.sampler.dump_memory_snapshot(sub_dir=self._step)
