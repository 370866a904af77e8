"""The record of a run: ``metrics.jsonl`` in its folder, one line per step, complete after any number of resumes.

A line is ``{"step": ..., "data": {metric: value}}``. Steps of the PPO trainer add details: ``response_length`` (a
histogram), ``workers`` (seconds and memory of every rank), ``phases`` (digests) and ``samples``.

Every line is strict JSON. A number that is not finite is written as ``"NaN"``, ``"Infinity"`` or ``"-Infinity"`` and
read back as a number if it is a metric. Records with bare ``NaN`` can be read too.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NotRequired, Required, TypedDict

from verl.utils.observe.tracking import Metrics, numbers_of, plain

logger = logging.getLogger(__name__)

RECORD_NAME = "metrics.jsonl"


class LengthHistogram(TypedDict):
    """Response lengths of a step, in equal bins from 0 to ``limit`` tokens."""

    limit: int
    counts: list[int]


class WorkerReport(TypedDict):
    """The report of one rank on a step: seconds by call, GiB by kind of memory, figures of its inference engine."""

    rank: int
    seconds: dict[str, float]
    memory: dict[str, float]
    generation: NotRequired[dict[str, float]]


class Sample(TypedDict):
    """One sampled response; ``kind`` says why it was chosen."""

    kind: str
    prompt: str
    response: str
    score: float
    tokens: int
    truth: NotRequired[str | None]
    reward_failure: NotRequired[str]


class Details(TypedDict, total=False):
    """Details of a step in addition to its metrics; ``phases`` maps phase and part to a digest."""

    response_length: LengthHistogram | None
    workers: dict[str, list[WorkerReport]] | None
    phases: dict[str, dict[str, str]]
    samples: list[Sample]


class Entry(Details):
    """One step of a record."""

    data: Required[dict[str, Any]]


def record_of(run: str | Path) -> Path:
    """Return the path of a run's record, given the run's folder or the record itself.

    Raises: FileNotFoundError if there is none.
    """
    path = Path(run)
    path = path if path.is_file() else path / RECORD_NAME
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist: give the trainer.default_local_dir of a run")
    return path


def read_entries(path: str | Path, strict: bool = True) -> dict[int, Entry]:
    """Return metrics and details of every step in order, without a last line that a kill cut short.

    Raises: ValueError naming file and line if another line is malformed; without ``strict`` it is skipped with a
    warning.
    """
    entries: dict[int, Entry] = {}
    lines = Path(path).read_bytes().splitlines()
    for number, line in enumerate(lines, 1):
        try:
            step, data, details = parse_line(line)
        except ValueError as error:
            if number == len(lines):
                logger.warning("%s: skipped the last line, which is incomplete", path)
                break
            if strict:
                raise ValueError(f"{path}, line {number}: {error}") from None
            logger.warning("%s: skipped line %d: %s", path, number, error)
            continue
        merge_entry(entries, step, data, details)
    return entries


def parse_line(line: bytes) -> tuple[int, dict[str, Any], Details]:
    """Return step, metrics and details of one line of a record.

    Raises: ValueError if the line is malformed.
    """
    try:
        read = json.loads(line.decode("utf-8"))
        return int(read.pop("step")), numbers_of(dict(read.pop("data"))), read
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of a run record ({error})") from None


def merge_entry(entries: dict[int, Entry], step: int, data: Metrics, details: Details) -> None:
    """Add metrics and details to those of a step."""
    entry = entries.get(step, {"data": {}})
    entries[step] = {**entry, **details, "data": entry["data"] | dict(data)}


def read_record(path: str | Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of every step of a record; see ``read_entries``."""
    return {step: entry["data"] for step, entry in read_entries(path).items()}


class RunRecord:
    """Appends the metrics of each step; a step that is logged twice stays one line."""

    def __init__(self, folder: str | Path, resumed_step: int | None) -> None:
        """Continue the record of ``folder`` after ``resumed_step``, or start a new one if that is None.

        Later steps are dropped, because the run repeats them. A new record keeps the one that it replaces as
        ``metrics.previous.jsonl``.
        """
        self.path = Path(folder, RECORD_NAME)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.steps: set[int] = set()
        if self.path.exists():
            if resumed_step is None:
                self.path.replace(self.path.with_name("metrics.previous.jsonl"))
            else:
                known = read_entries(self.path, strict=False)  # a damaged record must not prevent a resume
                kept = {step: entry for step, entry in known.items() if step <= resumed_step}
                self.steps = set(kept)
                self._rewrite(kept)

    def log(self, data: Metrics, step: int, details: Details | None = None) -> None:
        """Write metrics and details of a step, merged with those already recorded.

        A failed write, such as to a full disk, loses the step with a warning and does not end the run.
        """
        try:
            if step in self.steps:
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
