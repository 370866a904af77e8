"""Write the report of a run: one self-contained HTML file."""

import os
import secrets
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path

from jinja2 import Template

from verl.utils.observe.record import Sample, read_shaped, record_of
from verl.utils.observe.timeline import timelines_of
from verl.utils.report.flags import MIN_STEPS, Entries, find_flags, keys_of, points_of
from verl.utils.report.panels import NOTES, WHY_ABSENT, css_variables, draw_panels, expected_panels, is_supervised

REPORT_NAME = "report.html"
MAX_SAMPLE_STEPS = 24
"""Number of steps whose samples the page shows, evenly spaced from the last to the first."""

_TEMPLATE = Path(__file__).with_name("page.html")


def write_report(run: str | Path, output: str | Path | None = None) -> Path:
    """Write the report of a run and return its path.

    Args:
        run: folder of the run, or its record.
        output: file or folder to write to; by default next to the record.

    Raises: FileNotFoundError without a record, ValueError for an empty one, ImportError without matplotlib.
    """
    source = record_of(run)
    entries = read_shaped(source)
    if not entries:
        raise ValueError(f"{source} holds no step yet: give the folder of a run that has finished a step")
    target = Path(output) if output else source.with_name(REPORT_NAME)
    target = target / REPORT_NAME if target.is_dir() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.tmp")
    folder = source.absolute().parent
    links = [os.path.relpath(path, target.absolute().parent) for path in timelines_of(folder)]
    unfinished.write_text(render(entries, folder.name, links), encoding="utf-8", errors="replace")
    unfinished.replace(target)
    return target


def render(entries: Entries, name: str, timelines: Sequence[str] = ()) -> str:
    """Return the HTML of the report; the template escapes all text of the run. ``timelines`` are links to files."""
    flags = find_flags(entries)
    pictures = draw_panels(entries, flags)
    missing = [panel for panel in expected_panels(entries) if panel.name not in pictures]
    samples = _samples(entries)
    reported = [(step, workers) for step, entry in sorted(entries.items()) if (workers := entry.get("workers"))]
    worker_step, workers = reported[-1] if reported else (None, None)
    return Template(_TEMPLATE.read_text(encoding="utf-8"), autoescape=True).render(
        name=name,
        nonce=secrets.token_urlsafe(16),
        light=css_variables(dark=False),
        dark=css_variables(dark=True),
        tiles=_tiles(entries),
        flags=flags,
        steps=sum(step > 0 for step in entries),
        min_steps=MIN_STEPS,
        pictures=pictures,
        notes=NOTES,
        absent=[p.title + (f" ({WHY_ABSENT[p.name]})" if p.name in WHY_ABSENT else "") for p in missing],
        samples=samples,
        kinds=sorted({sample["kind"] for rows in samples.values() for sample in rows}),
        conversations=any("turns" in sample for rows in samples.values() for sample in rows),
        supervised=is_supervised(entries),
        timelines=timelines,
        worker_step=worker_step,
        workers=workers,
        metrics=_metrics(entries),
    )


_LONGEST_S = 1e13
"""About the longest time that ``timedelta`` can hold."""
_TILES = (
    ("loss, training", "train/loss", "{:.3f}"),
    ("loss, validation", "val/loss", "{:.3f}"),
    ("score, mean", "critic/score/mean", "{:.3f}"),
    ("response length", "response_length/mean", "{:.0f}"),
    ("seconds per step", "timing_s/step", "{:.2f}"),
    ("tokens/s per worker", "perf/throughput", "{:,.0f}"),
)


def _tiles(entries: Entries) -> list[tuple[str, str]]:
    """Return the key figures of the run, each with its label."""
    steps = [step for step in entries if step > 0] or list(entries)
    tiles = [("steps", f"{min(steps)} to {max(steps)}" if len(steps) > 1 else str(steps[0]))]
    timers = ("timing_s/step", "timing_s/testing", "timing_s/save_checkpoint")
    seconds = sum(value for timer in timers for _, value in points_of(entries, timer))
    tiles.append(("time in steps", str(timedelta(seconds=round(min(max(seconds, 0.0), _LONGEST_S))))))
    of_validation = [(key.removeprefix("val-core/"), key, "{:.3f}") for key in keys_of(entries, "val-core/")[:3]]
    for label, key, form in (*_TILES, *of_validation):
        values = [form.format(value) for _, value in points_of(entries, key)]
        if values:
            tiles.append((label, f"{values[0]} → {values[-1]}" if len(values) > 1 else values[0]))
    return tiles


def _samples(entries: Entries) -> dict[int, list[Sample]]:
    """Return the samples of evenly spaced steps, the last step first."""
    steps = [step for step in sorted(entries, reverse=True) if entries[step].get("samples")]
    count = min(MAX_SAMPLE_STEPS, len(steps))
    chosen = sorted({round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)})
    return {steps[at]: entries[steps[at]]["samples"] for at in chosen}


def _metrics(entries: Entries) -> list[tuple[str, tuple[float, ...]]]:
    """Return the first, last, lowest and highest value of every metric."""
    rows: list[tuple[str, tuple[float, ...]]] = []
    for key in keys_of(entries):
        values = [value for _, value in points_of(entries, key)]
        if values:
            rows.append((key, (values[0], values[-1], min(values), max(values))))
    return rows
