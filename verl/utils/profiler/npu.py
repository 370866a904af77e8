"""The Ascend profiler of torch_npu, with ranges of MSTX."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from verl.utils.profiler.captures import SharedCapture, step_folder
from verl.utils.profiler.config import NPUToolConfig
from verl.utils.profiler.ranges import marked_range

_capture = SharedCapture()
_DEFAULT_CONTENTS = ("npu", "cpu")


class NPUProfiler:
    """One trace of the process from ``start`` to ``stop``, or with ``discrete`` one for each task."""

    def __init__(self, options: NPUToolConfig, save_path: str | None, role: str) -> None:
        self.options, self.save_path, self.role = options, save_path, role
        self.discrete = options.discrete
        self._step: Any = None
        self._running: Any = None

    def start(self, role: str | None = None, profile_step: Any = None) -> None:
        """Begin a step; ``role`` names the folder of its trace."""
        self._step = profile_step
        if not self.discrete:
            _capture.open(lambda: self._begin(role or self.role))

    def stop(self) -> None:
        """End a step and write its trace."""
        if not self.discrete:
            _capture.close(_end_current)

    def _begin(self, role: str) -> None:
        folder = str(step_folder(self.save_path, self._step) / role)
        _current.append(npu_profile(self.options, folder))
        _current[-1].start()

    @contextmanager
    def task(self, name: str, role: str, **options: Any) -> Iterator[None]:
        """Mark a task, and with ``discrete`` trace it into the folder of its role."""
        if self.discrete:
            _capture.open(lambda: self._begin(role))
        try:
            with marked_range(name):
                yield
        finally:
            if self.discrete:
                _capture.close(_end_current)

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Mark a part of a task."""
        return marked_range(name)

    def step(self) -> None:
        """Do nothing: a trace holds all mini-batches."""


_current: list[Any] = []
"""The profiler of torch_npu that runs in this process, which whoever closes the capture ends."""


def _end_current() -> None:
    profile = _current.pop()
    profile.step()
    profile.stop()


def npu_profile(options: NPUToolConfig, folder: str) -> Any:
    """Return a profiler of torch_npu that writes into ``folder``."""
    from torch_npu import profiler

    contents = options.contents or _DEFAULT_CONTENTS
    level = {
        "level_none": profiler.ProfilerLevel.Level_none,
        "level0": profiler.ProfilerLevel.Level0,
        "level1": profiler.ProfilerLevel.Level1,
        "level2": profiler.ProfilerLevel.Level2,
    }[options.level]
    activities = {"npu": profiler.ProfilerActivity.NPU, "cpu": profiler.ProfilerActivity.CPU}
    return profiler.profile(
        activities=[activity for name, activity in activities.items() if name in contents],
        record_shapes="shapes" in contents,
        profile_memory="memory" in contents,
        with_modules="module" in contents,
        with_stack="stack" in contents,
        on_trace_ready=profiler.tensorboard_trace_handler(folder, analyse_flag=options.analysis),
        experimental_config=profiler._ExperimentalConfig(
            profiler_level=level, export_type=profiler.ExportType.Db, data_simplification=True, msprof_tx=True
        ),
    )
