"""What a person sees of a run while it goes on: a table or a bar on a terminal, one line per step elsewhere."""

import importlib.util
import sys
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from verl.utils import envs
from verl.utils.observe.console import send_console_to

MODES = ("table", "bar", "lines", "off")
_BAR_FORMAT = "{desc} {percentage:3.0f}% |{bar:16}| {n_fmt}/{total_fmt} | {remaining} left{postfix}"


class Display(Protocol):
    """Where lines and progress are shown."""

    def write(self, text: str) -> None:
        """Show a line."""

    def progress(self, step: int, total: int, start: int, text: str, seconds: float) -> None:
        """Show that ``step`` of ``total`` is done, in a run that began after ``start``; the step took ``seconds``."""

    def close(self) -> None:
        """End the display of progress; lines may still come."""


class LocalDisplay:
    """The terminal of this process.

    ``VERL_PROGRESS``, or ``mode`` where that is not set, is ``table``, ``bar``, ``lines``, ``off`` or ``auto``: the
    first of them that standard error can show. The table is drawn from the record in ``folder``.
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
        self._bar: Any = None
        self._table: Any = None

    def write(self, text: str) -> None:
        """Show a line, above the bar where there is one."""
        if self._bar is not None:
            self._bar.write(text, file=sys.stdout)
        elif self._table is not None:
            self._table.write(text)
        else:
            sys.stdout.write(f"{text}\n")
        sys.stdout.flush()

    def progress(self, step: int, total: int, start: int, text: str, seconds: float) -> None:
        """Move the bar, or write the line of a finished step; ``step == start`` says that training begins."""
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
            from tqdm import tqdm

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
        """Leave the bar or the table as it is and go on below it."""
        for shown in (self._bar, self._table):
            if shown is not None:
                shown.close()
        self._bar = self._table = None


_display: Display | None = None


def set_display(display: Display) -> None:
    """Show lines and progress of this process there."""
    global _display
    _display = display
    send_console_to(display.write)


class Progress:
    """Show step, reward, validation, tokens per second and the time left of a run."""

    def __init__(self, total_steps: int, start_step: int) -> None:
        """Expect steps ``start_step + 1`` to ``total_steps``."""
        self._display = _display or LocalDisplay()
        self.total, self.start, self.validation = total_steps, start_step, ""
        self._display.progress(start_step, total_steps, start_step, "", 0.0)

    def note(self, metrics: Mapping[str, Any]) -> None:
        """Remember the latest validation."""
        values = [value for key, value in metrics.items() if key.startswith("val-core/")]
        if values:
            self.validation = f"{sum(values) / len(values):.3f}"

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show a finished step."""
        self.note(metrics)
        seconds = float(metrics.get("timing_s/step", 0.0))
        self._display.progress(step, self.total, self.start, self._describe(metrics), seconds)

    def _describe(self, metrics: Mapping[str, Any]) -> str:
        parts = [f"reward {metrics['critic/score/mean']:.3f}"] if "critic/score/mean" in metrics else []
        if self.validation:
            parts.append(f"validation {self.validation}")
        if metrics.get("perf/time_per_step"):
            parts.append(f"{metrics['perf/total_num_tokens'] / metrics['perf/time_per_step']:,.0f} tokens/s")
        return " | ".join(parts)

    def close(self) -> None:
        """End the display."""
        self._display.close()
