"""The activity file of the trainer process, which the launching process reads even if the trainer has died.

The file holds one line of JSON. A thread touches it every second: a file that grows old means that the process is
stopped, or that a call holds its interpreter.
"""

import functools
import json
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

logger = logging.getLogger(__name__)

BEAT_S = 1.0


@dataclass(frozen=True)
class Activity:
    """A process and the phase that it is in, such as ``in phase reward, step 2``; and its scorer while one runs."""

    pid: int
    host: str
    phase: str = "at the start"
    scorer: str = ""

    def __str__(self) -> str:
        return f"{self.phase}, in the scorer {self.scorer}" if self.scorer else self.phase


class ActivityFile:
    """The file of one process: ``write`` in that process, ``read`` and ``modified_ns`` in another one."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, activity: Activity) -> None:
        """Replace the file, so that a reader never sees half a line; if its folder has gone, nobody reads it.

        A failed write, such as to a full disk, loses the note, with one warning.
        """
        new = self._path.with_suffix(".new")
        try:
            new.write_text(json.dumps(asdict(activity)), encoding="utf-8")
            os.replace(new, self._path)
        except FileNotFoundError:
            pass
        except OSError as error:
            _warn_once(f"{new} cannot be written ({error.strerror}): messages name an old phase, and the run continues")

    def read(self) -> Activity | None:
        """Return the activity; None before the process has written one, or when somebody has removed the file."""
        with suppress(FileNotFoundError):
            text = self._path.read_text(encoding="utf-8")
            return Activity(**json.loads(text)) if text else None
        return None

    def modified_ns(self) -> int:
        """Return the time of the last sign of life; the present time if the file was removed."""
        with suppress(FileNotFoundError):
            return self._path.stat().st_mtime_ns
        return time.time_ns()

    def touch_for_ever(self) -> None:
        """Give a sign of life every second, until the file has gone."""
        while True:
            try:
                os.utime(self._path)
            except FileNotFoundError:
                return
            except OSError as error:
                _warn_once(f"{self._path} gives no sign of life ({error.strerror})")
            time.sleep(BEAT_S)


@functools.cache
def _warn_once(text: str) -> None:
    logger.warning(text)


_file: ActivityFile | None = None
_activity = Activity(os.getpid(), "")


def report_activity_to(path: Path) -> None:
    """Let this process write its activity to an existing file, from now on."""
    global _file, _activity
    _file = ActivityFile(path)
    _activity = Activity(os.getpid(), socket.gethostname())
    _file.write(_activity)
    threading.Thread(target=_file.touch_for_ever, name="activity", daemon=True).start()


def note_phase(text: str) -> None:
    """Write the phase of this process, if a launching process reads it."""
    _note(replace(_activity, phase=text))


@contextmanager
def noted_scorer(text: str) -> Iterator[None]:
    """Write that a scorer runs during a block."""
    _note(replace(_activity, scorer=text))
    try:
        yield
    finally:
        _note(replace(_activity, scorer=""))


def _note(activity: Activity) -> None:
    global _activity
    if _file is not None and threading.current_thread() is threading.main_thread():
        _activity = activity
        _file.write(activity)
