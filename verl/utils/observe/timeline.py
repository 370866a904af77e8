"""The timeline of a step: the spans of each process, in a file that https://ui.perfetto.dev opens.

A process records spans between ``start`` and ``take``; without ``start``, a span costs one look at a variable. The
driver gathers the spans of all processes and writes them by ``write_timeline``.

Spans that belong together, such as those of one trajectory, have a ``group``. Groups that overlap in time become
tracks of their own, and so do spans that overlap within a group, such as parallel tool calls.
"""

import json
import os
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple, TypedDict

from verl.utils.failures import on_failure
from verl.utils.json_types import Json

FOLDER = "timeline"
"""Name of the folder of the timelines, within the folder of a run."""
RECORDED = "timeline"
"""Meta of a batch: whether to record the work on it; meta of the answer: the ``Part`` that was recorded."""
MOST_SPANS = 200_000
"""Spans that a process keeps between two calls of ``take``; older ones are dropped."""
QUEUE = "queue"
SAMPLE = "sample"
"""Names of the two parts of a request: it waits in the server, and its tokens are sampled."""
_LONGEST_TEXT = 300


class Clock(NamedTuple):
    """One instant by both clocks of a process. All processes of a ``host`` share the monotonic clock."""

    host: str
    wall: float
    monotonic: float

    @classmethod
    def now(cls) -> "Clock":
        """Read both clocks."""
        return cls(_host(), time.time(), time.monotonic())

    def offset_to(self, other: "Clock") -> float:
        """Return the offset that converts monotonic seconds of this clock to another process's clock.

        It is 0 on the same host. Elsewhere it relies on the wall clocks, which NTP keeps within milliseconds.
        """
        if self.host == other.host:
            return 0.0
        return (self.wall - self.monotonic) - (other.wall - other.monotonic)


@cache
def _host() -> str:
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
    except OSError:
        boot = ""
    return boot or socket.gethostname()


@dataclass(slots=True)
class Span:
    """One activity of a process from ``start`` to ``end``, in monotonic seconds.

    Attributes:
        group: spans with the same one belong together.
        on: who did the work, if not the process itself, such as a server or a tool; it gets a track with the span.
        args: details of the span, which Perfetto shows.
    """

    name: str
    start: float
    end: float
    category: str = ""
    group: str = ""
    on: str | None = None
    args: dict[str, Json] = field(default_factory=dict)


@dataclass
class Part:
    """The spans of one process."""

    process: str
    clock: Clock
    spans: list[Span]


class Event(TypedDict, total=False):
    """An event of the Chrome trace format; times are in microseconds."""

    name: str
    cat: str
    ph: str
    ts: float
    dur: float
    pid: int
    tid: int
    args: Mapping[str, Json]


class Trace(TypedDict):
    """A file of the Chrome trace format."""

    traceEvents: list[Event]
    displayTimeUnit: str
    otherData: dict[str, float]


# ---- in every process

_spans: deque[Span] | None = None
_group: ContextVar[str] = ContextVar("timeline_group", default="")


def start() -> None:
    """Record spans in this process from now on."""
    global _spans
    if _spans is None:
        _spans = deque(maxlen=MOST_SPANS)


def is_recording() -> bool:
    """Return whether this process records spans."""
    return _spans is not None


def take(process: str) -> Part | None:
    """Stop recording and return the spans; None if this process did not record."""
    global _spans
    taken = _spans
    _spans = None
    return None if taken is None else Part(process, Clock.now(), list(taken))


@contextmanager
def grouped(group: str) -> Iterator[None]:
    """Put the spans of the enclosed code, and of the tasks that it starts, into a group."""
    token = _group.set(group)
    try:
        yield
    finally:
        _group.reset(token)


@contextmanager
def span(name: str, category: str = "", on: str | None = None, **args: Json) -> Iterator[dict[str, Json]]:
    """Record the enclosed code, even if it raises; yields the arguments, to which it may add."""
    spans = _spans
    if spans is None:
        yield args
        return
    begin = time.monotonic()
    try:
        with on_failure(lambda error: args.update(outcome=type(error).__name__)):
            yield args
    finally:
        shown = {key: _short(value) for key, value in args.items()}  # a tool may answer with megabytes
        spans.append(Span(name, begin, time.monotonic(), category, _group.get(), on, shown))


def add_request(server: str, begin: float, queue_s: float, sample_s: float, **args: Json) -> None:
    """Record a request that a server has answered just now, by the durations that the server has measured.

    The server's clock may differ from the clock of this process. So the request is put in the middle of the time that
    the caller has waited, which is wrong by half the transport time at most.

    Args: ``begin`` is when the caller sent it.
    """
    if _spans is None:
        return
    waited = time.monotonic() - begin
    inside = min(waited, queue_s + sample_s)
    first = begin + (waited - inside) / 2
    middle = first + min(queue_s, inside)
    group = _group.get()
    _spans.append(Span(QUEUE, first, middle, "request", group, server, args))
    _spans.append(Span(SAMPLE, middle, first + inside, "request", group, server, args))


# ---- in the driver


def timeline_path(folder: str | Path, step: int) -> Path:
    """Return the file of the timeline of a step of a run."""
    return Path(folder, FOLDER, f"step_{step}.json")


def timelines_of(folder: str | Path) -> list[Path]:
    """Return the timelines of a run, in the order of their steps."""
    found = [path for path in Path(folder, FOLDER).glob("step_*.json") if path.stem.removeprefix("step_").isdigit()]
    return sorted(found, key=step_of)


def step_of(path: Path) -> int:
    """Return the step of a timeline."""
    return int(path.stem.removeprefix("step_"))


def write_timeline(path: Path, parts: Sequence[Part], clock: Clock, step: int) -> None:
    """Write the spans of all processes on one clock; the file appears only when it is complete."""
    from verl.utils.observe.tracking import plain  # here, because timers import this module and need no tracker

    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".json.tmp")
    text = json.dumps(plain(chrome_trace(parts, clock, step)), ensure_ascii=False, allow_nan=False)
    unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(unfinished, path)


def chrome_trace(parts: Sequence[Part], clock: Clock, step: int) -> Trace:
    """Return the spans in the Chrome trace format: one process per part, server and tool, and tracks by group."""
    tracks: dict[str, list[Span]] = {}
    for part in parts:
        offset = part.clock.offset_to(clock)
        for each in part.spans:
            moved = Span(
                each.name, each.start + offset, each.end + offset, each.category, each.group, each.on, each.args
            )
            # Requests are shown at the server only; the caller has another span.
            if each.on is None or each.category != "request":
                tracks.setdefault(part.process, []).append(moved)
            if each.on is not None:
                tracks.setdefault(each.on, []).append(moved)
    origin = min((each.start for spans in tracks.values() for each in spans), default=clock.monotonic)
    events: list[Event] = []
    for pid, (process, spans) in enumerate(tracks.items(), 1):
        events.append({"name": "process_name", "ph": "M", "pid": pid, "args": {"name": process}})
        events.append({"name": "process_sort_index", "ph": "M", "pid": pid, "args": {"sort_index": pid}})
        for tid, lane in enumerate(lanes_of(spans), 1):
            name = f"{process} {tid}" if lane[0].group else "main"
            events.append({"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}})
            events += [_event(each, pid, tid, origin) for each in lane]
        if all(each.on == process for each in spans):
            events += _counters(spans, pid, origin)
    started = clock.wall - clock.monotonic + origin
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"step": step, "started_unix_s": started}}


def lanes_of(spans: Iterable[Span]) -> list[list[Span]]:
    """Distribute spans over as few tracks as possible, so that spans of a track are nested or follow one another.

    A group that nests has one track, to which other groups come after it has ended.
    """
    groups: dict[str, list[Span]] = {}
    for each in sorted(spans, key=lambda each: (each.start, -each.end)):
        groups.setdefault(each.group, []).append(each)
    lanes: list[list[Span]] = []
    free_at: list[float] = []
    for group, members in groups.items():
        for stack in _nested(members):
            begin = stack[0].start
            end = max(each.end for each in stack)
            at = next((at for at, free in enumerate(free_at) if group and free <= begin), len(lanes))
            if at == len(lanes):
                lanes.append([])
                free_at.append(end)
            lanes[at] += stack
            free_at[at] = end if group else float("inf")
    return lanes


def _nested(spans: Iterable[Span]) -> list[list[Span]]:
    """Split spans, sorted by their start, into lists in which each span is inside of another or after it."""
    lists: list[list[Span]] = []
    open_ends: list[list[float]] = []
    for each in spans:
        for members, ends in zip(lists, open_ends, strict=True):
            while ends and ends[-1] <= each.start:
                ends.pop()
            if not ends or each.end <= ends[-1]:
                members.append(each)
                ends.append(each.end)
                break
        else:
            lists.append([each])
            open_ends.append([each.end])
    return lists


def _event(each: Span, pid: int, tid: int, origin: float) -> Event:
    args = {name: _short(value) for name, value in each.args.items()}
    if each.group:
        args["group"] = each.group
    return {
        "name": each.name,
        "cat": each.category or "phase",
        "ph": "X",
        "ts": _us(each.start - origin),
        "dur": _us(each.end - origin) - _us(each.start - origin),
        "pid": pid,
        "tid": tid,
        "args": args,
    }


def _counters(spans: Iterable[Span], pid: int, origin: float) -> list[Event]:
    """Return how many spans of each name a server or a tool had at each time."""
    names = sorted({each.name for each in spans})
    changes = sorted(chain.from_iterable(((each.start, 1, each.name), (each.end, -1, each.name)) for each in spans))
    counts = dict.fromkeys(names, 0)
    at: dict[float, dict[str, int]] = {}
    for moment, change, name in changes:
        counts[name] += change
        at[_us(moment - origin)] = dict(counts)
    return [
        {"name": "at the same time", "ph": "C", "ts": moment, "pid": pid, "args": values}
        for moment, values in at.items()
    ]


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)


def _short(value: Json) -> Json:
    text = value if isinstance(value, str) else None
    return value if text is None or len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}..."
