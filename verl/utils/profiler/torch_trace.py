"""Profile with ``torch.profiler``: one Chrome trace per role, rank and step, for https://ui.perfetto.dev."""

import gc
import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function, schedule

from verl.utils.memory_utils import return_freed_host_memory
from verl.utils.profiler.captures import Tool, make_save_folder, step_folder
from verl.utils.profiler.config import TorchProfilerToolConfig
from verl.utils.profiler.ranges import Range

logger = logging.getLogger(__name__)

_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "cuda": ProfilerActivity.CUDA}
Schedule = Callable[[int], ProfilerAction]
"""Action of the profiler in a mini-batch, which is counted from 0."""


class TorchTrace(Tool):
    """Record every task of a role, and within a task the mini-batches that the options choose."""

    options: TorchProfilerToolConfig

    def __init__(self, options: TorchProfilerToolConfig, save_path: str | None, role: str, rank: int) -> None:
        super().__init__(options, save_path, role, rank)
        make_save_folder(save_path)
        self._folder = step_folder(save_path, 0)
        self._recorded: dict[Path, list[profile]] = {}
        self._tasks: Counter[str] = Counter()
        self._window: Window | None = None

    @property
    def path(self) -> Path:
        """Return the trace file of the current step."""
        first = self.options.first
        end = self.options.step_end
        name = f"prof_start_{first}_end_{'last' if end is None else end}"
        if self.options.active is not None:
            name = f"prof_first_{first}_active_{self.options.active}"
        return self._folder / self.role / f"{name}_rank_{self.rank}.json"

    def start(self, role: str | None = None, profile_step: int | str | None = None) -> None:
        """Begin a step."""
        self._folder = step_folder(self.save_path, profile_step)
        self._recorded = {}
        self._tasks.clear()

    def stop(self) -> None:
        """Write the traces of the step, if the role had a task in it."""
        recorded = self._recorded
        self._recorded = {}
        if not recorded:
            logger.info("%s had no task in this step, so there is no trace", self.role)
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            for path, recorders in recorded.items():
                write_trace(recorders, path)
        finally:  # a recorder is a reference cycle and holds tens of bytes per byte of its trace
            recorded.clear()
            recorders = []
            gc.collect()
            return_freed_host_memory()

    @contextmanager
    def task(self, name: str, role: str, mini_batches: bool = False, **marks: str | None) -> Iterator[None]:
        """Record a task; a nested task becomes a range of the outer one."""
        if _running:
            with record_function(name):
                yield
            return
        window = Window(self._recorder, name, schedule_of(self.options) if mini_batches else _whole)
        _running.append(window)
        self._window = window
        try:
            with window:
                yield
        finally:
            _running.remove(window)
            self._window = None
            self._keep(window.recorded, role)
        if not window.recorded:
            first = self.options.first
            logger.warning("first mini-batch %d: no trace, because %s had only %d mini-batches", first, name, window.at)

    def range(self, name: str) -> Range:
        """Mark a part of a task."""
        return record_function(name)

    def step(self) -> None:
        """Note the end of a mini-batch."""
        if self._window is not None:
            self._window.step()

    def _recorder(self) -> profile:
        contents = self.options.contents
        activities = [_ACTIVITIES[part] for part in contents if part in _ACTIVITIES]
        return profile(
            activities=activities or None,
            record_shapes="shapes" in contents or not contents,
            profile_memory="memory" in contents,
        )

    def _keep(self, recorded: list[profile], task: str) -> None:
        """Keep a task's events, for the trace of the step or for a separate trace."""
        path = self.path
        if self.options.discrete:
            path = path.with_name(f"{task}_{self._tasks[task]}_{path.name}")
            self._tasks[task] += 1
        if recorded:
            self._recorded.setdefault(path, []).extend(recorded)


def _whole(at: int) -> ProfilerAction:
    return ProfilerAction.RECORD


def schedule_of(options: TorchProfilerToolConfig) -> Schedule:
    """Return torch's schedule of cycles, or one that records the mini-batches [``step_start``, ``step_end``)."""
    if options.active is not None:
        cycle = {"wait": options.wait, "warmup": options.warmup, "active": options.active}
        chosen: Schedule = schedule(**cycle, repeat=options.repeat, skip_first=options.skip_first)
        return chosen
    start = options.step_start
    end = options.step_end

    def of_range(at: int) -> ProfilerAction:
        if at < start or (end is not None and at >= end):
            return ProfilerAction.WARMUP if at == start - 1 else ProfilerAction.NONE
        return ProfilerAction.RECORD_AND_SAVE if at + 1 == end else ProfilerAction.RECORD

    return of_range


class Window(AbstractContextManager["Window"]):
    """Records the mini-batches of a task that a schedule chooses, with a recorder for each cycle.

    torch's own loop over a schedule is not used: its ranges of steps would cross the begin and the end of the task.
    """

    def __init__(self, new_recorder: Callable[[], profile], name: str, chosen: Schedule) -> None:
        self.recorded: list[profile] = []
        self.name = name
        self.at = 0
        self._new_recorder = new_recorder
        self._chosen = chosen
        self._recorder: profile | None = None
        self._is_recording = False
        self._begun_at = 0
        self._task = ExitStack()

    def __enter__(self) -> "Window":
        self._turn()
        return self

    def __exit__(self, *error: object) -> None:
        is_empty = 0 < self.at == self._begun_at  # no mini-batch has come after the last one
        if self._is_recording and not is_empty:
            self._save()
        elif self._is_recording:
            self._task.close()
        elif self._recorder is not None:  # torch leaves the prepared state only through a trace
            self._recorder.start_trace()
            self._recorder.stop_trace()

    def step(self) -> None:
        """Note the end of a mini-batch."""
        if self._chosen(self.at) is ProfilerAction.RECORD_AND_SAVE:
            self._save()
        self.at += 1
        self._turn()

    def _turn(self) -> None:
        action = self._chosen(self.at)
        if action is ProfilerAction.NONE:
            return
        if self._recorder is None:
            self._recorder = self._new_recorder()
            self._recorder.prepare_trace()
        if action is not ProfilerAction.WARMUP and not self._is_recording:
            self._recorder.start_trace()
            self._is_recording = True
            self._begun_at = self.at
            self._task.callback(self._recorder.stop_trace)
            self._task.enter_context(record_function(self.name))

    def _save(self) -> None:
        assert self._recorder is not None
        self._task.close()
        self.recorded.append(self._recorder)
        self._recorder = None
        self._is_recording = False


_running: list[Window] = []
"""The task of this process that is recorded, at most one."""


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
