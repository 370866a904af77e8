"""What a trace must keep to by the Trace Event Format, the JSON that Chrome's and Perfetto's viewers load."""

import math
from collections import Counter, defaultdict
from typing import Any

PHASES = set("BEXiICnbePNODMsStTfFcRvV(),")
"""Kinds of events that the format knows."""
SLACK_US = 0.002
"""Times are written with three digits behind the point."""


def faults(trace: Any) -> list[str]:
    """Return what a viewer would refuse, drop or draw wrongly, one line each; the first hundred."""
    if not isinstance(trace, dict) or not isinstance(trace.get("traceEvents"), list):
        return ["no object with a list traceEvents"]
    found: list[str] = []
    slices, flows = defaultdict(list), defaultdict(Counter)
    for number, event in enumerate(trace["traceEvents"]):
        kind, where = event.get("ph"), f"event {number} ({event.get('name')!r})"
        if kind not in PHASES:
            found.append(f"{where}: ph is {kind!r}")
        elif not isinstance(event.get("name"), str):
            found.append(f"{where}: no name")
        elif kind != "M" and not _is_time(event.get("ts")):
            found.append(f"{where}: ts is {event.get('ts')!r}")
        elif kind == "M" and not isinstance(event.get("args"), dict):
            found.append(f"{where}: metadata without args")
        elif kind == "X":
            if not _is_time(event.get("dur")) or event["dur"] < 0 or "pid" not in event or "tid" not in event:
                found.append(f"{where}: a slice without dur, pid or tid")
            else:
                slices[event["pid"], event["tid"]].append((event["ts"], -event["dur"], where))
        elif kind in "stf":
            flows[event.get("cat"), event.get("id")][kind] += 1
    found += [f"flow {key} has {dict(ends)}" for key, ends in flows.items() if not ends["s"] or not ends["f"]]
    for thread, pieces in slices.items():
        found += [f"thread {thread}: {fault}" for fault in _overlaps(sorted(pieces))]
    return found[:100]


def _is_time(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _overlaps(pieces: list[tuple[float, float, str]]) -> list[str]:
    """Return the slices of a thread that neither hold another nor end before it begins."""
    found, open_ends = [], []
    for begin, less_duration, where in pieces:
        end = begin - less_duration
        while open_ends and open_ends[-1] <= begin + SLACK_US:
            open_ends.pop()
        if open_ends and end > open_ends[-1] + SLACK_US:
            found.append(f"{where} ends behind the slice that it begins in")
        else:
            open_ends.append(end)
    return found
