"""Show the progress of a run: a table or a bar on a terminal, one line per step elsewhere."""

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from tqdm import tqdm

from verl.utils import envs
from verl.utils.observe.console import send_console_to

if TYPE_CHECKING:
    from verl.utils.report.live import LiveTable

DescribeStep = Callable[[Mapping[str, Any]], Sequence[str | None]]
"""Returns the parts of a step's text, always the same number; None keeps the part of an earlier step."""

MODES = ("table", "bar", "lines", "off")
_BAR_FORMAT = "{desc} {percentage:3.0f}% |{bar:16}| {n_fmt}/{total_fmt} | {remaining} left{postfix}"


class Display(Protocol):
    """A place that shows lines and progress."""

    def write(self, text: str) -> None:
        """Show a line."""

    def progress(self, step: int, total: int, start: int, text: str, seconds: float) -> None:
        """Show that ``step`` of ``total`` took ``seconds``, in a run that began after ``start``."""

    def close(self) -> None:
        """End the progress display; lines may still follow."""


class LocalDisplay:
    """The terminal of this process.

    ``VERL_PROGRESS``, or if that is not set ``mode``, is ``table``, ``bar``, ``lines``, ``off`` or ``auto``: the first
    of these that standard error can show. The table shows the record in ``folder``.
    """

    def __init__(self, mode: str = "auto", folder: str | Path | None = None) -> None:
        self.mode = envs.read("VERL_PROGRESS") or mode
        if self.mode not in (*MODES, "auto"):
            raise ValueError(f"environment variable VERL_PROGRESS={self.mode!r} must be one of {(*MODES, 'auto')}")
        has_table = folder is not None and importlib.util.find_spec("rich") is not None
        if self.mode == "auto":
            self.mode = ("table" if has_table else "bar") if sys.stderr.isatty() else "lines"
        elif self.mode == "table" and not has_table:
            self.mode = "lines"
        self._folder = folder
        self._started = time.monotonic()
        self._bar: tqdm[None] | None = None
        self._table: LiveTable | None = None

    def write(self, text: str) -> None:
        """Show a line, above the bar if one is shown."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._table is not None:
            self._table.write(text)
        else:
            sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def progress(self, step: int, total: int, start: int, text: str, seconds: float) -> None:
        """Move the bar, or write the line of a finished step; with ``step == start`` training begins."""
        if self.mode == "bar":
            self._move_bar(step, total, start, text)
        elif self.mode == "table":
            self._draw_table(total)
        elif step == start:
            self._started = time.monotonic()
        elif self.mode == "lines":
            left = (time.monotonic() - self._started) / (step - start) * (total - step)
            self.write(f"step {step}/{total} | {text} | {seconds:.2f} s | {timedelta(seconds=round(left))} left")

    def _move_bar(self, step: int, total: int, start: int, text: str) -> None:
        if self._bar is None:
            self._bar = tqdm(total=total, initial=start, desc="training", dynamic_ncols=True, bar_format=_BAR_FORMAT)
        self._bar.set_postfix_str(text, refresh=False)
        self._bar.n = step
        self._bar.refresh()

    def _draw_table(self, total: int) -> None:
        if self._table is None:
            from verl.utils.report.live import LiveTable

            assert self._folder is not None
            self._table = LiveTable(self._folder, total)
        self._table.update()

    def close(self) -> None:
        """Leave the bar or the table on the terminal; later lines follow below it."""
        if self._bar is not None:
            self._bar.close()
        if self._table is not None:
            self._table.close()
        self._bar = None
        self._table = None


_display: Display | None = None


def set_display(display: Display) -> None:
    """Show the lines and the progress of this process on ``display``."""
    global _display
    _display = display
    send_console_to(display.write)


class Progress:
    """Show the steps of a run, each with the text that ``describe`` makes of its metrics."""

    def __init__(self, total_steps: int, start_step: int, describe: DescribeStep) -> None:
        """Expect steps ``start_step + 1`` to ``total_steps``."""
        self._display = _display or LocalDisplay()
        self._describe = describe
        self._parts: list[str | None] = []
        self.total = total_steps
        self.start = start_step
        self._display.progress(start_step, total_steps, start_step, "", 0.0)

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Remember the parts of the text that these metrics have."""
        parts = self._describe(metrics)
        before = self._parts or [None] * len(parts)
        self._parts = [old if new is None else new for old, new in zip(before, parts, strict=True)]

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step."""
        self.note(metrics)
        text = " | ".join(part for part in self._parts if part is not None)
        seconds = float(metrics.get("timing_s/step", 0.0))
        self._display.progress(step, self.total, self.start, text, seconds)

    def close(self) -> None:
        """End the display."""
        self._display.close()
