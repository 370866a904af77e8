"""``torch.profiler``: one Chrome trace per role, rank and step, which https://ui.perfetto.dev opens."""

import json
import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from verl.utils.profiler.captures import step_folder
from verl.utils.profiler.config import TorchProfilerToolConfig

logger = logging.getLogger(__name__)

_NO_END = 1 << 30
_running: list[profile] = []
"""The profiler that records in this process: there can be one."""


class TorchTrace:
    """Records every task of a role; of a task with mini-batches those from ``step_start`` to before ``step_end``."""

    def __init__(self, options: TorchProfilerToolConfig, save_path: str | None, role: str, rank: int) -> None:
        self.options, self.save_path, self.role, self.rank = options, save_path, role, rank
        self._folder = step_folder(save_path, 0)
        self._recorded: list[profile] = []
        self._limited: profile | None = None

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
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_trace(recorded, self.path)

    @contextmanager
    def task(self, name: str, role: str, mini_batches: bool = False, **options: Any) -> Iterator[None]:
        """Record a task; one inside of another is a range of it."""
        if _running:
            with record_function(name):
                yield
            return
        start, end = self.options.step_start, self.options.step_end
        limited = mini_batches and (start > 0 or end is not None)
        recorder = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])],
            schedule=mini_batch_schedule(start, end) if limited else None,
            record_shapes=True,
        )
        _running.append(recorder)
        self._limited = recorder if limited else None
        try:
            with recorder, record_function(name):
                yield
        finally:
            _running.remove(recorder)
            self._limited = None
            if not limited or recorder.step_num > start:
                self._recorded.append(recorder)
        if limited and recorder.step_num <= start:
            logger.warning("step_start=%d: %s had %d mini-batches, none is traced", start, name, recorder.step_num)

    def range(self, name: str) -> AbstractContextManager[Any]:
        """Mark a part of a task."""
        return record_function(name)

    def step(self) -> None:
        """Go on to the next mini-batch, where only some are recorded."""
        if self._limited is not None:
            self._limited.step()


def mini_batch_schedule(start: int, end: int | None) -> Any:
    """Return when to record: from mini-batch ``start``, after one of warm-up where there is one, to before ``end``."""
    warmup = min(start, 1)
    active = (_NO_END if end is None else end) - start
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # the first mini-batch has none before it to warm up
        return schedule(wait=start - warmup, warmup=warmup, active=active, repeat=1)


def write_trace(recorded: Sequence[profile], path: Path) -> None:
    """Write what was recorded one after another as one Chrome trace; the file appears when it is whole."""
    parts = [path.with_name(f"{path.name}.part{number}") for number in range(len(recorded))]
    for recorder, part in zip(recorded, parts, strict=True):
        recorder.export_chrome_trace(str(part))
    for part in parts[1:]:
        _append_events(parts[0], part)
        part.unlink()
    os.replace(parts[0], path)


def _append_events(trace: Path, other: Path) -> None:
    """Add the events of another trace of the same process, on the clock of the first."""
    first, second = (json.loads(each.read_text(encoding="utf-8")) for each in (trace, other))
    shift_us = (second.get("baseTimeNanoseconds", 0) - first.get("baseTimeNanoseconds", 0)) / 1000
    for event in second["traceEvents"]:
        if shift_us and "ts" in event:
            event["ts"] += shift_us
    first["traceEvents"] += second["traceEvents"]
    trace.write_text(json.dumps(first), encoding="utf-8")
