"""The record of a run: ``metrics.jsonl`` in its folder, one line per step, whole after any number of resumes.

A line is ``{"step": ..., "data": {metric: value}}`` and, for a step of the PPO trainer, its details beside ``data``:
``response_length`` (a histogram), ``workers`` (seconds and memory of every rank), ``phases`` (digests) and ``samples``.
Every line is JSON for strict readers too: a number that is not finite is the text ``"NaN"``, ``"Infinity"`` or
``"-Infinity"``, which is read back as the number where it is a metric. Records with bare ``NaN`` are read as well.
"""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.observe.tracking import numbers_of, plain

logger = logging.getLogger(__name__)

RECORD_NAME = "metrics.jsonl"

Entry = dict[str, Any]
"""What is known of a step: ``data``, its metrics, and the details by name."""


def read_entries(path: str | Path, strict: bool = True) -> dict[int, Entry]:
    """Return metrics and details of every step of a record, in order; a line cut short by a kill is left out.

    Raises: ValueError naming file and line where a line other than the last is not a record; unless ``strict``, which
    is left out with a warning.
    """
    entries: dict[int, Entry] = {}
    lines = Path(path).read_bytes().split(b"\n")
    lines = lines[:-1] if not lines[-1] else lines
    for number, line in enumerate(lines, 1):
        try:
            step, data, details = parse_line(line)
        except ValueError as error:
            if number == len(lines):
                logger.warning("%s: the last line is cut short and left out", path)
                break
            if strict:
                raise ValueError(f"{path}, line {number}: {error}") from None
            logger.warning("%s, line %d is left out: %s", path, number, error)
            continue
        merge_entry(entries, step, data, details)
    return entries


def parse_line(line: bytes) -> tuple[int, dict[str, Any], dict[str, Any]]:
    """Return step, metrics and details of one line of a record.

    Raises: ValueError where it is none.
    """
    try:
        read = json.loads(line.decode("utf-8"))
        return int(read.pop("step")), numbers_of(dict(read.pop("data"))), read
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"not a line of a run record ({error})") from None


def merge_entry(entries: dict[int, Entry], step: int, data: Mapping[str, Any], details: Mapping[str, Any]) -> None:
    """Add metrics and details to those of a step."""
    entry = entries.setdefault(step, {"data": {}})
    entry["data"].update(data)
    entry.update(details)


def read_record(path: str | Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of every step of a record; see ``read_entries``."""
    return {step: entry["data"] for step, entry in read_entries(path).items()}


class RunRecord:
    """Append the metrics of each step; a step that is logged twice stays one line."""

    def __init__(self, folder: str | Path, resumed_step: int | None) -> None:
        """Continue the record of ``folder`` after ``resumed_step``, or start a new one where that is None.

        Steps beyond ``resumed_step`` belong to work that is done again and are dropped. A new record keeps the one
        that it replaces as ``metrics.previous.jsonl``.
        """
        self.path = Path(folder, RECORD_NAME)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.steps: set[int] = set()
        if self.path.exists():
            if resumed_step is None:
                self.path.replace(self.path.with_name("metrics.previous.jsonl"))
            else:
                known = read_entries(self.path, strict=False)  # a run does not stay down for its record
                kept = {step: entry for step, entry in known.items() if step <= resumed_step}
                self.steps = set(kept)
                self._rewrite(kept)

    def log(self, data: Mapping[str, Any], step: int, details: Mapping[str, Any] | None = None) -> None:
        """Write metrics and details of a step, merged with what the step has already.

        What cannot be written, for instance to a full disk, is lost with a warning: the run does not end by it.
        """
        try:
            if step in self.steps:
                entries = read_entries(self.path)
                merge_entry(entries, step, data, details or {})
                self._rewrite(entries)
            else:
                self._append(_line(step, {"data": data, **(details or {})}).encode("utf-8", errors="backslashreplace"))
                self.steps.add(step)
        except OSError as error:
            logger.warning("step %d is missing in the record %s, and the run goes on: %s", step, self.path, error)

    def _append(self, line: bytes) -> None:
        """Write a whole line or, where that fails, none: the next one begins where it would have."""
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


def _line(step: int, entry: Mapping[str, Any]) -> str:
    """Return one line, also for readers that end a line at more characters than JSON escapes."""
    text = json.dumps(plain({"step": step, **entry}), ensure_ascii=False, allow_nan=False)
    return text.translate(_OTHER_LINE_ENDS) + "\n"
