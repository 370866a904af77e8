"""The log of agent loops: ``attempts.jsonl`` in the folder of a run, one line for each attempt at a trajectory."""

import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypedDict

from verl.utils.observe.record import set_aside
from verl.utils.observe.tracking import plain

logger = logging.getLogger(__name__)

ATTEMPTS_NAME = "attempts.jsonl"


class AttemptLine(TypedDict):
    """One attempt at a sample: its row, servers and requests, times, and outcome."""

    id: str
    uid: str
    sample: int
    loop: str
    servers: list[str]
    turns: int
    start: float
    end: float
    outcome: str
    reason: str | None


def read_attempts(folder: str | Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a run's account; each also has its ``step``. A line that a kill cut short is left out."""
    path = Path(folder, ATTEMPTS_NAME)
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                yield json.loads(line)
            except ValueError:
                logger.warning("%s: skipped line %d, which is incomplete", path, number)


class AttemptsRecord:
    """Appends attempts to the account of a run; a run without agent loops has no such file."""

    def __init__(self, folder: str | Path, resumed_step: int | None) -> None:
        """Continue the log after ``resumed_step``, dropping later lines; None starts a new log.

        Replaced logs are kept under other names, as replaced records of metrics are.
        """
        self.path = Path(folder, ATTEMPTS_NAME)
        if not self.path.exists():
            return
        if resumed_step is None:
            set_aside(self.path)
            return
        unfinished = self.path.with_suffix(".jsonl.tmp")
        with unfinished.open("w", encoding="utf-8") as file:
            file.writelines(_line(each) for each in read_attempts(folder) if each.get("step", 0) <= resumed_step)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(self.path)

    def log(self, step: int, lines: Iterable[AttemptLine]) -> None:
        """Write the attempts of a step; a failed write loses them with a warning and does not end the run."""
        text = "".join(_line({"step": step, **line}) for line in lines)
        if not text:
            return
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with self.path.open("a", encoding="utf-8") as file:
                file.write(text)
        except OSError as error:
            logger.warning(
                "step %d: attempts could not be written to %s; the run continues: %s", step, self.path, error
            )


def _line(line: Any) -> str:
    return json.dumps(plain(line), ensure_ascii=True, allow_nan=False) + "\n"
