"""The record of a run: ``metrics.jsonl`` in its folder, one line per step, whole after any number of resumes."""

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from verl.utils.tracking import plain

logger = logging.getLogger(__name__)

RECORD_NAME = "metrics.jsonl"


def read_record(path: str | Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of every step of a record, in order; a line cut short by a kill is left out.

    Raises: ValueError naming file and line where a line other than the last is not a record.
    """
    steps: dict[int, dict[str, Any]] = {}
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        try:
            entry = json.loads(line)
            steps.setdefault(int(entry["step"]), {}).update(entry["data"])
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):
                logger.warning("%s: the last line is cut short and left out", path)
                break
            raise ValueError(f"{path}, line {number}: not a line of a run record ({error})") from None
    return steps


class RunRecord:
    """Append the metrics of each step; a step that is logged twice stays one line."""

    def __init__(self, folder: str | Path, resumed_step: int | None) -> None:
        """Continue the record of ``folder`` after ``resumed_step``, or start a new one where that is None.

        Steps beyond ``resumed_step`` belong to work that is done again and are dropped. A new record keeps the one
        that it replaces as ``metrics.previous.jsonl``.
        """
        self.path = Path(folder, RECORD_NAME)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.steps: dict[int, dict[str, Any]] = {}
        if self.path.exists():
            if resumed_step is None:
                self.path.replace(self.path.with_name("metrics.previous.jsonl"))
            else:
                self.steps = {step: data for step, data in read_record(self.path).items() if step <= resumed_step}
                self._rewrite()

    def log(self, data: Mapping[str, Any], step: int) -> None:
        """Write the metrics of a step, merged with what the step has already."""
        again = step in self.steps
        self.steps.setdefault(step, {}).update({key: plain(value) for key, value in data.items()})
        if again:
            self._rewrite()
            return
        with self.path.open("a", encoding="utf-8") as file:
            file.write(self._line(step))

    def _line(self, step: int) -> str:
        return json.dumps({"step": step, "data": self.steps[step]}, ensure_ascii=False) + "\n"

    def _rewrite(self) -> None:
        unfinished = self.path.with_suffix(".jsonl.tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(self._line(step) for step in sorted(self.steps))
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)
