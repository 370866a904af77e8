"""Profile with ``torch.profiler``: one Chrome trace per role, rank and step, for https://ui.perfetto.dev."""

import gc
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from torch.profiler import profile, record_function

from verl.utils.memory_utils import return_freed_host_memory
from verl.utils.profiler.captures import Tool, make_save_folder, step_folder
from verl.utils.profiler.config import TorchProfilerToolConfig
from verl.utils.profiler.ranges import Range

logger = logging.getLogger(__name__)

_running: list[profile] = []
"""The recording profiler of this process, at most one."""


class TorchTrace(Tool):
    """Records every task of a role; of a task with mini-batches only those in [``step_start``, ``step_end``)."""

    options: TorchProfilerToolConfig

    def __init__(self, options: TorchProfilerToolConfig, save_path: str | None, role: str, rank: int) -> None:
        super().__init__(options, save_path, role, rank)
        make_save_folder(save_path)
        self._folder = step_folder(save_path, 0)
        self._recorded: list[profile] = []
        self._window: Window | None = None

    @property
    def path(self) -> Path:
        """Return the trace file of the current step."""
        end = "last" if self.options.step_end is None else self.options.step_end
        name = f"prof_start_{self.options.step_start}_end_{end}_rank_{self.rank}.json"
        return self._folder / self.role / name

    def start(self, role: str | None = None, profile_step: int | str | None = None) -> None:
        """Begin a step."""
        self._folder = step_folder(self.save_path, profile_step)
        self._recorded = []

    def stop(self) -> None:
        """Write the trace of the step, if the role had a task in it."""
        recorded = self._recorded
        self._recorded = []
        if not recorded:
            logger.info("%s had no task in this step, so there is no trace", self.role)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            write_trace(recorded, self.path)
        finally:  # a recorder is a reference cycle and holds tens of bytes per byte of its trace
            del recorded
            gc.collect()
            return_freed_host_memory()

    @contextmanager
    def task(self, name: str, role: str, mini_batches: bool = False, **marks: str | None) -> Iterator[None]:
        """Record a task; a nested task becomes a range of the outer one."""
        if _running:
            with record_function(name):
                yield
            return
        recorder = profile(record_shapes=True)
        start = self.options.step_start if mini_batches else 0
        window = Window(recorder, name, start, self.options.step_end if mini_batches else None)
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
            logger.warning("step_start=%d: no trace, because %s had only %d mini-batches", start, name, window.at)

    def range(self, name: str) -> Range:
        """Mark a part of a task."""
        return record_function(name)

    def step(self) -> None:
        """Note the end of a mini-batch."""
        if self._window is not None:
            self._window.step()


class Window(AbstractContextManager["Window"]):
    """Records mini-batches [``start``, ``end``) of a task, after one mini-batch of warm-up if there is one.

    torch's own schedule is not used: its ranges of steps would cross the begin and the end of the task.
    """

    def __init__(self, recorder: profile, name: str, start: int, end: int | None) -> None:
        self.recorder = recorder
        self.name = name
        self.start = start
        self.end = end
        self.at = 0
        self.recorded = False
        self._is_prepared = False
        self._task = ExitStack()

    def __enter__(self) -> "Window":
        self._turn()
        return self

    def __exit__(self, *error: object) -> None:
        if self._is_prepared and not self.recorded:  # torch leaves the prepared state only through a trace
            self._begin()
        self._task.close()

    def step(self) -> None:
        """Note the end of a mini-batch."""
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
    """Write consecutive recordings as one Chrome trace; the file appears only when it is complete.

    Raises: OSError if it cannot be written.
    """
    parts = [path.with_name(f"{path.name}.part{number}") for number in range(len(recorded))]
    try:
        for recorder, part in zip(recorded, parts, strict=True):
            recorder.export_chrome_trace(str(part))
            if not part.is_file():  # torch's writer does not raise
                raise OSError(f"torch could not write {part}; check the free space on the disk")
        if len(parts) > 1:
            _join(parts)
        os.replace(parts[0], path)
    finally:
        for part in parts:
            for left in (part, part.with_name(f"{part.name}.tmp")):  # torch writes to .tmp first
                left.unlink(missing_ok=True)


def _join(parts: Sequence[Path]) -> None:
    """Append the events of the later traces to the first, shifted to its clock; all are of one process."""
    whole = json.loads(parts[0].read_text(encoding="utf-8"))
    for part in parts[1:]:
        trace = json.loads(part.read_text(encoding="utf-8"))
        shift_us = (trace.get("baseTimeNanoseconds", 0) - whole.get("baseTimeNanoseconds", 0)) / 1000
        for event in trace["traceEvents"]:
            if shift_us and "ts" in event:
                event["ts"] += shift_us
        whole["traceEvents"] += trace["traceEvents"]
    parts[0].write_text(json.dumps(whole), encoding="utf-8")
