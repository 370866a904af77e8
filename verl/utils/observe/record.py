"""The record of a run: ``metrics.jsonl`` in its folder, one line per step, complete after any number of resumes.

A line is ``{"step": ..., "data": {metric: value}}``. Steps of the PPO trainer add details: ``response_length`` (a
histogram), ``workers`` (seconds and memory of every rank), ``phases`` (digests) and ``samples``.

Every line is strict JSON. A number that is not finite is written as ``"NaN"``, ``"Infinity"`` or ``"-Infinity"`` and
read back as a number if it is a metric. Records with bare ``NaN`` can be read too.
"""

import json
import logging
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, NotRequired, Required, TypedDict, get_args, get_origin, get_type_hints, is_typeddict

from verl.utils.observe.tracking import Metrics, numbers_of, plain

logger = logging.getLogger(__name__)

RECORD_NAME = "metrics.jsonl"
KEPT_RECORDS = 10
"""How many records of earlier runs a folder keeps."""


LARGEST = 1e150
"""Numbers beyond it count as infinite, so that sums and squares stay finite."""


class LengthHistogram(TypedDict):
    """Response lengths of a step, in equal bins from 0 to ``limit`` tokens."""

    limit: float
    counts: list[float]


class WorkerReport(TypedDict):
    """The report of one rank on a step: seconds by call, GiB by kind of memory, figures of its inference engine."""

    rank: int | str
    seconds: dict[str, float]
    memory: dict[str, float]
    generation: NotRequired[dict[str, float]]


class SampleCall(TypedDict):
    """A tool call of a sampled trajectory."""

    name: str
    arguments: str
    outcome: str
    seconds: float
    reward: NotRequired[float | None]


class SampleTurn(TypedDict):
    """A turn of a sampled trajectory: who spoke, the text of its tokens, and the tool calls that it answers."""

    role: str
    text: str
    tokens: int | str
    seconds: float
    calls: list[SampleCall]


class Sample(TypedDict):
    """One sampled response; ``kind`` says why it was chosen."""

    kind: str
    prompt: str
    response: str
    score: float
    tokens: int | str
    truth: NotRequired[int | str | None]
    reward_failure: NotRequired[str]
    turns: NotRequired[list[SampleTurn]]


Data = dict[str, Any]
"""The metrics of a step: numbers, except for values that a user's trainer adds."""


class Details(TypedDict, total=False):
    """Details of a step in addition to its metrics; ``phases`` maps phase and part to a digest."""

    response_length: LengthHistogram | None
    workers: dict[str, list[WorkerReport]] | None
    phases: dict[str, dict[str, str]]
    samples: list[Sample]


class Entry(Details):
    """One step of a record."""

    data: Required[Data]


def record_of(run: str | Path) -> Path:
    """Return the path of a run's record, given the run's folder or the record itself.

    Raises: FileNotFoundError if there is none, ValueError if it is not a file.
    """
    path = Path(run)
    path = path / RECORD_NAME if path.is_dir() else path
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give the trainer.default_local_dir of a run")
    if not path.is_file():
        raise ValueError(f"{path} is no regular file: give the trainer.default_local_dir of a run")
    return path


def read_entries(path: str | Path, strict: bool = True) -> dict[int, Entry]:
    """Return metrics and details of every step in order, without a last line that a kill cut short.

    Raises: ValueError naming file and line if another line is malformed; without ``strict`` it is skipped with a
    warning.
    """
    entries: dict[int, Entry] = {}
    content = Path(path).read_bytes()
    lines = content.splitlines()
    for number, line in enumerate(lines, 1):
        try:
            step, data, details = parse_line(line)
        except ValueError as error:
            if entries and number == len(lines) and not content.endswith(b"\n"):
                logger.warning("%s: skipped the last line, which is incomplete", path)
                break
            if strict:
                raise ValueError(f"{path}, line {number}: {error}: remove the line, or name another run") from None
            logger.warning("%s: skipped line %d: %s", path, number, error)
            continue
        merge_entry(entries, step, data, details)
    return entries


def last_step(path: Path) -> int | None:
    """Return the last step of a record; None if it holds none that can be read."""
    with suppress(OSError):
        for line in reversed(path.read_bytes().splitlines()):
            with suppress(ValueError):
                return parse_line(line)[0]
    return None


def parse_line(line: bytes) -> tuple[int, Data, Details]:
    """Return step, metrics and details of one line of a record.

    Raises: ValueError if the line is malformed.
    """
    try:
        read = json.loads(line.decode("utf-8"))
        step = read.pop("step")
        data = read.pop("data")
        if not isinstance(step, int) or abs(step) > _LAST_STEP or not isinstance(data, dict):
            raise ValueError("step must be an integer and data a mapping")
        return int(step), numbers_of(data), read
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a line of a run record ({error})") from None


_LAST_STEP = 2**53
_LONGEST_NAME = 200


def shaped(value: Any, hint: Any) -> Any:
    """Convert a value of a record, which may hold anything, to the type of its place in ``Entry``.

    A value in place of a number becomes NaN, one in place of a text becomes its ``str``; unknown keys are dropped.
    """
    origin = get_origin(hint)
    arguments = get_args(hint)
    if is_typeddict(hint):
        given = value if isinstance(value, dict) else {}
        hints = get_type_hints(hint)
        present = [name for name in hints if name in given or name in hint.__required_keys__]
        return {name: shaped(given.get(name), hints[name]) for name in present}
    if hint is Any:
        return value
    if origin is dict:
        given = value if isinstance(value, dict) else {}
        return {_printable(name): shaped(part, arguments[1]) for name, part in given.items()}
    if origin is list:
        return [shaped(part, arguments[0]) for part in value] if isinstance(value, list) else []
    if origin is UnionType:
        if value is None and NoneType in arguments:
            return None
        return value if type(value) in arguments else shaped(value, str if str in arguments else arguments[0])
    if hint is float:
        number = numbers_of(value)
        is_number = isinstance(number, int | float) and (number != number or abs(number) <= LARGEST)
        return float(number) if is_number else math.nan
    return value if isinstance(value, str) else str(value)


def _printable(name: str) -> str:
    """Return the name of a metric, call or group without the control characters of a terminal."""
    return "".join(char if char.isprintable() else "\ufffd" for char in name[:_LONGEST_NAME])


def read_shaped(path: str | Path) -> dict[int, Entry]:
    """Return the entries of a record from anywhere, with details of the right types; for reports.

    Raises: as ``read_entries``.
    """
    return {step: shaped(entry, Entry) for step, entry in read_entries(path).items()}


def merge_entry(entries: dict[int, Entry], step: int, data: Metrics, details: Details) -> None:
    """Add metrics and details to a step that may have some."""
    entry = entries.get(step, {"data": {}})
    entries[step] = {**entry, **details, "data": entry["data"] | dict(data)}


def read_record(path: str | Path) -> dict[int, Data]:
    """Return the metrics of every step of a record; see ``read_entries``."""
    return {step: entry["data"] for step, entry in read_entries(path).items()}


def set_aside(path: Path) -> None:
    """Rename a record that a run from scratch replaces, and keep the last ``KEPT_RECORDS`` of them.

    The newest is ``<name>.previous.jsonl``, the one before it ``<name>.previous.2.jsonl``, and so on.
    """
    names = [f"{path.stem}.previous{'' if age == 1 else f'.{age}'}{path.suffix}" for age in range(1, KEPT_RECORDS + 1)]
    places = [path, *map(path.with_name, names)]
    for newer, older in reversed(list(pairwise(places))):
        if newer.exists():
            newer.replace(older)


class RunRecord:
    """Appends the metrics of each step; a step that is logged twice stays one line."""

    def __init__(self, folder: str | Path, resumed_step: int | None) -> None:
        """Continue the record of ``folder`` after ``resumed_step``, or start a new one if that is None.

        Later steps are dropped, because the run repeats them. A new record keeps those that it replaces; see
        ``set_aside``.
        """
        self.path = Path(folder, RECORD_NAME)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.steps: set[int] = set()
        if self.path.exists():
            if resumed_step is None:
                set_aside(self.path)
            else:
                known = read_entries(self.path, strict=False)  # a damaged record must not prevent a resume
                kept = {step: entry for step, entry in known.items() if step <= resumed_step}
                self.steps = set(kept)
                self._rewrite(kept)

    def log(self, data: Metrics, step: int, details: Details | None = None) -> None:
        """Write metrics and details of a step in its place, merged with those already recorded.

        A failed write, such as to a full disk, loses the step with a warning and does not end the run.
        """
        try:
            if self.steps and step <= max(self.steps):
                entries = read_entries(self.path)
                merge_entry(entries, step, data, details or {})
                self._rewrite(entries)
            else:
                line = _line(step, {"data": dict(data), **(details or {})})
                self._append(line.encode("utf-8", errors="backslashreplace"))
            self.steps.add(step)
        except OSError as error:
            logger.warning(
                "step %d could not be written to the record %s; the run continues: %s", step, self.path, error
            )

    def _append(self, line: bytes) -> None:
        """Write a whole line; if that fails, restore the length of the file."""
        with self.path.open("ab", buffering=0) as file:
            begin = file.seek(0, os.SEEK_END)
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[file.write(rest) :]
                os.fsync(file.fileno())  # the tracker of checkpoints may name the step next
            except OSError:
                file.truncate(begin)
                raise

    def _rewrite(self, entries: Mapping[int, Entry]) -> None:
        unfinished = self.path.with_suffix(".jsonl.tmp")
        with unfinished.open("w", encoding="utf-8", errors="backslashreplace") as file:
            file.writelines(_line(step, entries[step]) for step in sorted(entries))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)


_OTHER_LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""Characters that ``str.splitlines`` takes for line ends and JSON does not escape."""


def _line(step: int, entry: Entry) -> str:
    """Return one line of the record."""
    text = json.dumps(plain({"step": step, **entry}), ensure_ascii=False, allow_nan=False)
    return text.translate(_OTHER_LINE_ENDS) + "\n"
