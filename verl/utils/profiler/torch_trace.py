"""``torch.profiler``: one Chrome trace per role, rank and step, which https://ui.perfetto.dev opens."""

import gc
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from verl.utils.memory_utils import return_freed_host_memory
from verl.utils.profiler.captures import make_save_folder, step_folder
from verl.utils.profiler.config import TorchProfilerToolConfig

logger = logging.getLogger(__name__)

_running: list[profile] = []
"""The profiler that records in this process: there can be one."""


class TorchTrace:
    """Records every task of a role; of a task with mini-batches those from ``step_start`` to before ``step_end``."""

    def __init__(self, options: TorchProfilerToolConfig, save_path: str | None, role: str, rank: int) -> None:
        self.options, self.save_path, self.role, self.rank = options, save_path, role, rank
        make_save_folder(save_path)
        self._folder = step_folder(save_path, 0)
        self._recorded: list[profile] = []
        self._window: Window | None = None

    @property
    def path(self) -> Path:
        """The trace of the current step."""
        start, end = self.options.step_start, self.options.step_end
        name = f"prof_start_{start}_end_{'last' if end is None else end}_rank_{self.rank}.json"
        return self._folder / self.role / name

    def start(self, role: str | None = None, profile_step: Any = None) -> None:
        """Begin a step."""
        self._folder = step_folder(self.save_path, profile_step)
        self._recorded = []

    def stop(self) -> None:
        """Write the trace of the step; nothing where the role had no task in it."""
        recorded, self._recorded = self._recorded, []
        if not recorded:
            logger.info("%s had no task in this step: no trace", self.role)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(recorded, self.path)
        finally:  # a recorder holds itself, and tens of bytes for each byte of its trace
            del recorded
            gc.collect()
            return_freed_host_memory()

    @contextmanager
    def task(self, name: str, role: str, mini_batches: bool = False, **options: Any) -> Iterator[None]:
        """Record a task; one inside of another is a range of it."""
        if _running:
            with record_function(name):
                yield
            return
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        recorder = profile(activities=activities, record_shapes=True)
        start, end = (self.options.step_start, self.options.step_end) if mini_batches else (0, None)
        window = Window(recorder, name, start, end)
        _running.append(recorder)
        self._window = window
        try:
            with window:
                yield
        finally:
            _running.remove(recorder)
            self._window = None
            if window.recorded:
                self._recorded.append(recorder)
        if not window.recorded:
            logger.warning("step_start=%d: %s had %d mini-batches, none is traced", start, name, window.at)

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Mark a part of a task."""
        return record_function(name)

    def step(self) -> None:
        """Go on to the next mini-batch, where only some are recorded."""
        if self._window is not None:
            self._window.step()


class Window(AbstractContextManager["Window"]):
    """Records a task by its name from mini-batch ``start``, after one of warm-up where there is one, to before ``end``.

    torch's own schedule marks each step from its begin to its end, across the begin or the end of the task.
    """

    def __init__(self, recorder: profile, name: str, start: int, end: int | None) -> None:
        self.recorder, self.name, self.start, self.end = recorder, name, start, end
        self.at, self.recorded = 0, False
        self._is_prepared, self._task = False, ExitStack()

    def __enter__(self) -> "Window":
        self._turn()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_prepared and not self.recorded:  # what is prepared can only be left by way of a trace
            self._begin()
        self._task.close()

    def step(self) -> None:
        """Go on to the next mini-batch."""
        self.at += 1
        self._turn()

    def _turn(self) -> None:
        if self.at == max(self.start - 1, 0):
            self.recorder.prepare_trace()
            self._is_prepared = True
        if self.at == self.start:
            self._begin()
            self.recorded = True
        if self.at == self.end:
            self._task.close()

    def _begin(self) -> None:
        self.recorder.start_trace()
        self._task.callback(self.recorder.stop_trace)
        self._task.enter_context(record_function(self.name))


def write_trace(recorded: Sequence[profile], path: Path) -> None:
    """Write what was recorded one after another as one Chrome trace; the file appears when it is whole.

    Raises: OSError where it cannot be written.
    """
    parts = [path.with_name(f"{path.name}.part{number}") for number in range(len(recorded))]
    try:
        for recorder, part in zip(recorded, parts, strict=True):
            recorder.export_chrome_trace(str(part))
            if not part.is_file():  # the writer of torch raises nothing
                raise OSError(f"torch could not write {part}: is there room on the disk?")
        if len(parts) > 1:
            _join(parts)
        os.replace(parts[0], path)
    finally:
        for part in parts:
            for left in (part, part.with_name(f"{part.name}.tmp")):  # the second is of torch
                left.unlink(missing_ok=True)


def _join(parts: Sequence[Path]) -> None:
    """Add to the first trace the events of the others, which are of the same process, on the clock of the first."""
    whole = json.loads(parts[0].read_text(encoding="utf-8"))
    for part in parts[1:]:
        trace = json.loads(part.read_text(encoding="utf-8"))
        shift_us = (trace.get("baseTimeNanoseconds", 0) - whole.get("baseTimeNanoseconds", 0)) / 1000
        for event in trace["traceEvents"]:
            if shift_us and "ts" in event:
                event["ts"] += shift_us
        whole["traceEvents"] += trace["traceEvents"]
    parts[0].write_text(json.dumps(whole), encoding="utf-8")
