"""Write the report of a run: one self-contained HTML file."""

import logging
from collections.abc import Mapping, Sequence
from datetime import timedelta
from html import escape
from pathlib import Path
from string import Template

from verl.utils.observe.record import Sample, read_entries, record_of
from verl.utils.report.flags import MIN_STEPS, Entries, Flag, find_flags, points_of
from verl.utils.report.panels import PANELS, WHY_ABSENT, draw_panels, expected_panels
from verl.utils.report.style import css_variables

logger = logging.getLogger(__name__)

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
    entries = read_entries(source)
    if not entries:
        raise ValueError(f"{source} holds no step yet")
    target = Path(output) if output else source.with_name(REPORT_NAME)
    target = target / REPORT_NAME if target.is_dir() else target
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.tmp")
    unfinished.write_text(render(entries, source.absolute().parent.name), encoding="utf-8", errors="replace")
    unfinished.replace(target)
    return target


def render(entries: Entries, name: str) -> str:
    """Return the HTML of the report."""
    flags = find_flags(entries)
    pictures = draw_panels(entries, flags)
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        name=escape(name),
        light=css_variables(dark=False),
        dark=css_variables(dark=True),
        summary=_summary(entries),
        flags=_flags(flags, sum(step > 0 for step in entries)),
        panels=_panels(pictures, entries),
        samples=_samples(entries),
        workers=_workers(entries),
        metrics=_metrics(entries),
    )


# ---- sections of the page


def _summary(entries: Entries) -> str:
    """Return tiles with the key figures of the run."""
    steps = [step for step in entries if step > 0] or list(entries)
    tiles = [("steps", f"{min(steps)} to {max(steps)}" if len(steps) > 1 else str(steps[0]))]
    seconds = sum(
        value for key in ("step", "testing", "save_checkpoint") for _, value in points_of(entries, f"timing_s/{key}")
    )
    tiles.append(("time in steps", str(timedelta(seconds=round(seconds)))))
    validation = sorted({key for entry in entries.values() for key in entry["data"] if key.startswith("val-core/")})
    of_validation = [(key.removeprefix("val-core/"), key, "{:.3f}") for key in validation[:3]]
    for label, key, form in (*_TILES, *of_validation):
        values = [form.format(value) for _, value in points_of(entries, key)]
        if values:
            tiles.append((label, f"{values[0]} → {values[-1]}" if len(values) > 1 else values[0]))
    cells = [f"<div><dt>{escape(label)}</dt><dd>{escape(value)}</dd></div>" for label, value in tiles]
    return f"<dl>{''.join(cells)}</dl>"


_TILES = (
    ("loss, training", "train/loss", "{:.3f}"),
    ("loss, validation", "val/loss", "{:.3f}"),
    ("score, mean", "critic/score/mean", "{:.3f}"),
    ("response length", "response_length/mean", "{:.0f}"),
    ("seconds per step", "timing_s/step", "{:.2f}"),
    ("tokens/s per worker", "perf/throughput", "{:,.0f}"),
)


def _flags(flags: Sequence[Flag], steps: int) -> str:
    if not flags:
        short = f" Trends are judged from {MIN_STEPS} steps on." if steps < MIN_STEPS else ""
        return f'<p class="calm">No problems found.{short}</p>'
    rows = [
        f'<li><b>{escape(flag.name)}</b> <a href="#{flag.panel}">from step {flag.step}</a>: {escape(flag.reason)}.</li>'
        for flag in flags
    ]
    return f"<ul>{''.join(rows)}</ul>"


def _panels(pictures: Mapping[str, str], entries: Entries) -> str:
    missing = [panel for panel in expected_panels(entries) if panel.name not in pictures]
    absent = [panel.title + (f" ({WHY_ABSENT[panel.name]})" if panel.name in WHY_ABSENT else "") for panel in missing]
    figures = []
    for panel in PANELS:
        if panel.name not in pictures:
            continue
        caption = f"<figcaption>{escape(panel.note)}</figcaption>" if panel.note else ""
        figures.append(f'<figure id="{panel.name}">{pictures[panel.name]}{caption}</figure>')
    note = f'<p class="calm">No data for: {escape(", ".join(absent))}.</p>' if absent else ""
    return f'<div class="panels">{"".join(figures)}</div>{note}'


def _samples(entries: Entries) -> str:
    """Return the table of sampled responses, the last step first."""
    steps = [step for step in sorted(entries, reverse=True) if entries[step].get("samples")]
    if not steps and any("train/loss" in entry["data"] for entry in entries.values()):
        return '<p class="calm">Supervised training samples no responses.</p>'
    if not steps:
        return (
            '<p class="calm">The record holds no samples: the run made no training step, or trainer.record_samples=0.'
            "</p>"
        )
    count = min(MAX_SAMPLE_STEPS, len(steps))
    chosen = sorted({round(i * (len(steps) - 1) / max(1, count - 1)) for i in range(count)})
    rows = "".join(_sample_row(steps[at], sample) for at in chosen for sample in entries[steps[at]]["samples"])
    kinds = sorted({sample["kind"] for at in chosen for sample in entries[steps[at]]["samples"]})
    options = "".join(f"<option>{escape(kind)}</option>" for kind in kinds)
    numbers = "".join(f"<option>{steps[at]}</option>" for at in chosen)
    return (
        f'<p class="filters"><label>kind <select id="kind"><option>all</option>{options}</select></label> '
        f'<label>step <select id="step"><option>all</option>{numbers}</select></label></p>'
        '<div class="scroll"><table id="samples"><thead><tr><th>step<th>kind<th>score<th>tokens<th>prompt<th>response'
        f"<th>truth</tr></thead><tbody>{rows}</tbody></table></div>"
    )


def _sample_row(step: int, sample: Sample) -> str:
    truth = "" if sample.get("truth") is None else str(sample["truth"])
    failure = (
        f'<span class="failure">{escape(str(sample["reward_failure"]))}</span>' if "reward_failure" in sample else ""
    )
    return (
        f'<tr data-step="{step}" data-kind="{escape(sample["kind"])}"><td>{step}<td><span class="kind '
        f'{escape(sample["kind"])}">{escape(sample["kind"])}</span><td>{sample["score"]:.4g}{failure}'
        f"<td>{sample['tokens']}<td><pre>{escape(sample['prompt'])}</pre><td><pre>{escape(sample['response'])}</pre>"
        f"<td><pre>{escape(truth)}</pre></tr>"
    )


def _workers(entries: Entries) -> str:
    """Return seconds and memory of every rank in the last step that recorded them."""
    reported = [(step, workers) for step, entry in sorted(entries.items()) if (workers := entry.get("workers"))]
    if not reported:
        return '<p class="calm">The record holds no reports of workers.</p>'
    last, workers = reported[-1]
    rows = []
    for group, reports in workers.items():
        for report in reports:
            calls = sorted(report["seconds"].items(), key=lambda item: -item[1])
            seconds = ", ".join(f"{call} {spent:.3f}" for call, spent in calls)
            memory = ", ".join(f"{kind.removesuffix('_gb')} {value:.2f}" for kind, value in report["memory"].items())
            rows.append(f"<tr><td>{escape(group)}<td>{report['rank']}<td>{escape(seconds)}<td>{escape(memory)}</tr>")
    head = "<thead><tr><th>group<th>rank<th>seconds in calls<th>memory (GiB)</tr></thead>"
    return f"<p>Step {last}:</p><div class='scroll'><table>{head}<tbody>{''.join(rows)}</tbody></table></div>"


def _metrics(entries: Entries) -> str:
    """Return the first, last, lowest and highest value of every metric."""
    keys = sorted({key for entry in entries.values() for key in entry["data"]})
    rows = []
    for key in keys:
        values = [value for _, value in points_of(entries, key)]
        if values:
            cells = "".join(f"<td>{value:.6g}" for value in (values[0], values[-1], min(values), max(values)))
            rows.append(f"<tr><td>{escape(key)}{cells}</tr>")
    head = "<thead><tr><th>metric<th>first<th>last<th>lowest<th>highest</tr></thead>"
    return f"<div class='scroll'><table>{head}<tbody>{''.join(rows)}</tbody></table></div>"
