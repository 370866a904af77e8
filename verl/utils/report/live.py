"""Show a running job's metrics in the terminal, read from its record."""

import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from verl.utils.observe.console import get_console
from verl.utils.observe.record import RECORD_NAME, Entry, merge_entry, parse_line, shaped
from verl.utils.process.owner import has_owner
from verl.utils.report.flags import find_flags, keys_of, points_of

if TYPE_CHECKING:
    from rich.console import Group

ROWS: tuple[tuple[str, str, str], ...] = (
    ("train/loss", "loss", "{:.4f}"),
    ("val/loss", "loss, validation", "{:.4f}"),
    ("train/grad_norm", "gradient norm", "{:.3g}"),
    ("critic/score/mean", "reward, mean", "{:.3f}"),
    ("actor/entropy", "entropy (nats)", "{:.3f}"),
    ("actor/kl_loss", "KL to the reference", "{:.2e}"),
    ("actor/ppo_kl", "KL to the old policy", "{:.2e}"),
    ("actor/pg_clipfrac", "clip fraction", "{:.3f}"),
    ("actor/grad_norm", "gradient norm", "{:.3g}"),
    ("training/rollout_log_prob_diff_mean", "rollout mismatch, mean", "{:.1e}"),
    ("response_length/mean", "response length", "{:.0f}"),
    ("response_length/clip_ratio", "responses cut off", "{:.1%}"),
    ("timing_s/step", "seconds per step", "{:.2f}"),
    ("timing_s/gen", "  generation", "{:.2f}"),
    ("timing_s/update_actor", "  actor update", "{:.2f}"),
    ("perf/throughput", "tokens/s per worker", "{:,.0f}"),
    ("perf/mfu/actor", "MFU of the actor", "{:.1%}"),
    ("train/mfu", "MFU", "{:.1%}"),
)
_BARS = "▁▂▃▄▅▆▇█"
_WIDTH = 32
_LEAST_BARS = 8
_LEAST_NAME = 12
_MAX_JUDGED = 300


class RecordFollower:
    """Reads the lines that a record gained since the last call and keeps the columns that the table shows."""

    def __init__(self, folder: str | Path) -> None:
        self.path = Path(folder, RECORD_NAME)
        self.entries: dict[int, Entry] = {}
        self._inode = -1
        self._offset = 0

    def read(self) -> dict[int, Entry]:
        """Return all entries so far.

        Raises: ValueError naming the file if a line is malformed.
        """
        try:
            with self.path.open("rb") as file:
                status = os.fstat(file.fileno())
                if status.st_ino != self._inode or status.st_size < self._offset:  # replaced by a resumed run
                    self.entries = {}
                    self._inode = status.st_ino
                    self._offset = 0
                file.seek(self._offset)
                whole, _, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return self.entries
        if whole:
            self._offset += len(whole) + 1
            for line in whole.split(b"\n"):
                try:
                    step, data, details = parse_line(line)
                except ValueError as error:
                    raise ValueError(f"{self.path}: {error}") from None
                entry = shaped({"data": data, "workers": details.get("workers")}, Entry)
                merge_entry(self.entries, step, entry["data"], {"workers": entry["workers"]})
        return self.entries

    def thinned(self) -> dict[int, Entry]:
        """Return at most 300 evenly spaced steps, the last one included."""
        steps = sorted(self.entries)
        stride = -(-len(steps) // _MAX_JUDGED)
        return {step: self.entries[step] for step in steps[::-1][::stride][::-1]}


def sparkline(values: list[float], width: int = _WIDTH) -> str:
    """Return the last values as a line of bars, scaled from the lowest to the highest."""
    values = values[-width:]
    low = min(values)
    high = max(values)
    if high == low:
        return _BARS[0] * len(values)
    return "".join(_BARS[round((value - low) / (high - low) * (len(_BARS) - 1))] for value in values)


def table_rows(entries: dict[int, Entry]) -> list[tuple[str, str, str, str]]:
    """Return (name, last value, change since the step before, sparkline) of each metric that the run logged."""
    keys = list(ROWS)
    steps = sorted(entries)
    last = entries[steps[-1]]["data"]
    recent = {step: entries[step] for step in steps[-2 * _WIDTH :]}  # more than a sparkline shows
    validations = keys_of(entries, "val-core/")
    below = 1 + [key for key, _, _ in ROWS].index("critic/score/mean")
    for key in validations[:3]:
        keys.insert(below, (key, key.removeprefix("val-core/"), "{:.3f}"))
    rows = []
    for key, name, form in keys:
        values = [value for _, value in points_of(entries if key in validations else recent, key)]
        if not values or (key not in last and key not in validations):
            continue
        change = values[-1] - values[-2] if len(values) > 1 else 0.0
        rows.append((name, form.format(values[-1]), f"{change:+.2g}" if len(values) > 1 else "", sparkline(values)))
    return rows


def fitted(rows: list[tuple[str, str, str, str]], width: int) -> tuple[list[str], list[tuple[str, ...]]]:
    """Fit columns and rows into ``width`` characters: shorten the trend first, then drop it and the change."""
    heads = ["metric", "last", "change", "trend"]
    widths = [max(len(cell) for cell in column) for column in zip(heads, *rows, strict=True)]
    margins = 3  # padding and separator of a column; the last column has no separator
    left = width - sum(widths[:3]) - margins * len(heads) + 1
    if left >= _LEAST_BARS:
        return heads, [(*row[:3], row[3][-left:]) for row in rows]
    count = 3 if left + widths[0] + margins >= _LEAST_NAME else 2
    room = max(width - sum(widths[1:count]) - margins * count + 1, 1)
    return heads[:count], [(row[0] if len(row[0]) <= room else f"{row[0][: room - 1]}…", *row[1:count]) for row in rows]


class LiveTable:
    """Draws the table on standard error, below the run's log lines. Needs the package rich."""

    def __init__(self, folder: str | Path, total_steps: int | None = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._follower = RecordFollower(folder)
        self._total = total_steps
        self._console = Console(stderr=True)
        self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
        self._live.start()

    def update(self) -> int:
        """Redraw the table from the record and return the last step."""
        entries = self._follower.read()
        if not entries:
            return 0
        self._live.update(self._drawn(entries), refresh=True)
        return max(entries)

    def _drawn(self, entries: dict[int, Entry]) -> "Group":
        from rich import box
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        title = f"step {max(entries)}" + (f" of {self._total}" if self._total else "")
        table = Table(box=box.SIMPLE, title=title, title_justify="left", pad_edge=False)
        heads, rows = fitted(table_rows(entries), self._console.width)
        for name in heads:
            table.add_column(name, justify="right" if name in ("last", "change") else "left", no_wrap=True)
        for row in rows:
            table.add_row(*map(Text, row))
        found = find_flags(entries, course=self._follower.thinned())
        flags = [Text(f"! {flag.name} (step {flag.step}): {flag.reason}", "yellow") for flag in found]
        return Group(table, *flags)

    def write(self, text: str) -> None:
        """Print a line above the table."""
        self._console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Stop redrawing; the table stays on the screen."""
        self._live.stop()


def watch(folder: str | Path, interval_s: float = 1.0, steps: int | None = None) -> None:
    """Follow a run that another process makes, until it has ended, Ctrl-C, or step ``steps``.

    Print one line per step if standard error is not a terminal.
    """
    view = LiveTable(folder, steps) if sys.stderr.isatty() else LiveLines(folder)
    has_ended = False
    try:
        while True:
            # Checked before the update, so that the last step of an ended run is shown.
            has_ended = not has_owner(Path(folder))
            if view.update() >= (steps or sys.maxsize) or has_ended:
                break
            time.sleep(interval_s)
    except KeyboardInterrupt:
        pass
    finally:
        view.close()
    if has_ended:
        get_console().info("the run has ended")


class LiveLines:
    """Writes one line per new step."""

    def __init__(self, folder: str | Path) -> None:
        self._follower = RecordFollower(folder)
        self._shown = -1

    def update(self) -> int:
        """Write a line for each new step and return the last step."""
        entries = self._follower.read()
        for step in sorted(step for step in entries if step > self._shown):
            rows = table_rows({step: entries[step]})
            figures = " | ".join(f"{name.strip()} {value}" for name, value, _, _ in rows)
            get_console().info("step %d | %s", step, figures)
        self._shown = max(entries, default=-1)
        return max(self._shown, 0)

    def close(self) -> None:
        """Do nothing: every line is flushed when written."""
