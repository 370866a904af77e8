"""Snapshots of CUDA's caching allocator: what was allocated when, and by which lines."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from verl.utils.memory_utils import MemorySnapshotSampler, enable_memory_visualize
from verl.utils.profiler.captures import make_save_folder
from verl.utils.profiler.config import TorchMemoryToolConfig

_NOTHING = nullcontext()
_recording: list[bool] = []
_written: set[tuple[str, str]] = set()


class TorchMemoryProfiler:
    """Records from its construction on, and writes a snapshot at the end of each step."""

    def __init__(self, options: TorchMemoryToolConfig, save_path: str | None, rank: int) -> None:
        self.sampler = MemorySnapshotSampler(str(make_save_folder(save_path)), rank=rank)
        self._step = ""
        if not _recording:  # one history per process, whatever the number of its roles
            enable_memory_visualize(
                trace_alloc_max_entries=options.trace_alloc_max_entries,
                stack_depth=options.stack_depth,
                context=options.context,
                stacks=options.stacks,
                **options.kw_args,
            )
            _recording.append(True)

    def start(self, role: str | None = None, profile_step: Any = None) -> None:
        """Begin a step."""
        self._step = f"step{profile_step}"

    def stop(self) -> None:
        """Write the snapshot of the process, unless another of its roles has done so for this step."""
        if (self.sampler.out_dir, self._step) not in _written:
            _written.add((self.sampler.out_dir, self._step))
            self.sampler.dump_memory_snapshot(sub_dir=self._step)

    def task(self, name: str, role: str, **options: Any) -> AbstractContextManager[Any]:
        """Do nothing: the history holds the lines that allocate."""
        return _NOTHING

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Do nothing."""
        return _NOTHING

    def step(self) -> None:
        """Do nothing."""
