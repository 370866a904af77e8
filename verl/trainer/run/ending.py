"""The end of a run by a signal: time to save, report and curves, and a last line with the command to resume."""

import _thread
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from verl.errors import CheckpointError
from verl.trainer.run.resume import step_of
from verl.utils.checkpoint import find_latest_ckpt_path, get_checkpoint_tracker_filename
from verl.utils.observe.console import write_line
from verl.utils.observe.record import RECORD_NAME, last_step
from verl.utils.process.interrupts import (
    CODES,
    command_line,
    count_of_signals,
    ignore_signals,
    name_of,
    signal_of_the_end,
)
from verl.utils.process.lifetime import start_process

OUTPUTS_S = 5.0
"""Seconds for report and curves."""
_POLL_S = 0.02
_AFRESH = ("trainer.resume_mode=auto", "trainer.resume_from_path=null")


class EndRequested(RuntimeError):
    """A run has saved its last full step and ends because of SIGTERM."""


@dataclass
class Ending:
    """The last checkpoint and the command to resume, for the last line of a run that a signal ends.

    Create it before training starts, when all checkpoints in the folder are those of earlier runs.

    Attributes: ``folder`` is the folder of the run; ``resume_mode`` and ``resume_from_path`` are keys of the command
        that resumes, the latter only if the mode reads it; ``report`` is whether the run writes a report; ``save_s``
        holds the seconds after SIGTERM in which the run may save, None if it does not save; ``is_here`` is whether the
        trainer is known to run on this machine.
    """

    folder: Path
    resume_mode: str
    resume_from_path: str | None
    report: bool
    save_s: float | None
    is_here: bool = True
    _tracker: Path = field(init=False)
    _record: Path = field(init=False)

    def __post_init__(self) -> None:
        self._tracker = Path(get_checkpoint_tracker_filename(self.folder))
        self._record = self.folder / RECORD_NAME
        self._before = _version(self._tracker), _version(self._record)

    def has_unsaved_step(self) -> bool:
        """Whether the run may have finished a step that no checkpoint holds."""
        return not self._is_seen() or self._last_step() > self._step_of(self._checkpoint())

    def last_line(self) -> str:
        """Return the last line of a run: its checkpoint, its lost steps, and the command that resumes it."""
        checkpoint = self._checkpoint()
        saved = self._step_of(checkpoint)
        last = self._last_step()
        if not self._is_seen():
            place = f"{self.folder} is on the machine of the trainer"
            return f"{name_of(signal_of_the_end())}: {place}; go on with: {command_line()}"
        kept = "there is no checkpoint" if checkpoint is None else f"the last checkpoint is {checkpoint}"
        lost = "no full step is lost"
        if last > saved:
            lost = f"step {last} is lost" if last == saved + 1 else f"steps {saved + 1} to {last} are lost"
        has_other_start = self.resume_mode != "auto" or self.resume_from_path is not None
        command = command_line(_AFRESH if has_other_start and self._has_saved() else ())
        goes_on = "start again" if checkpoint is None else "go on"
        return f"{name_of(signal_of_the_end())}: {kept}, {lost}; {goes_on} with: {command}"

    def _is_seen(self) -> bool:
        return self.is_here or bool(self._last_step())

    def _has_saved(self) -> bool:
        return _version(self._tracker) not in (None, self._before[0])

    def _checkpoint(self) -> Path | None:
        """Return the folder to resume from: the last checkpoint of this run, or the one that it started from."""
        if not self._has_saved():
            if self.resume_mode == "disable":
                return None
            if self.resume_from_path is not None:
                return Path(self.resume_from_path).expanduser().absolute()
        latest = None
        with suppress(CheckpointError):
            latest = find_latest_ckpt_path(self.folder)
        return None if latest is None else Path(latest)

    @staticmethod
    def _step_of(checkpoint: Path | None) -> int:
        return 0 if checkpoint is None else step_of(checkpoint)

    def _last_step(self) -> int:
        """Return the last step that this run has recorded."""
        return 0 if _version(self._record) == self._before[1] else last_step(self._record) or 0

    def start_outputs(self) -> "list[subprocess.Popen[bytes]]":
        """Start to write report and curves, if the run has recorded a step."""
        if not self._last_step():
            return []
        modules = ["verl.utils.observe.curves", *(["verl.utils.report"] if self.report else [])]
        quiet = dict.fromkeys(("stdin", "stderr"), subprocess.DEVNULL)
        commands = [[sys.executable, "-m", module, str(self.folder)] for module in modules]
        return [start_process(command, process_group=0, **quiet) for command in commands]


@contextmanager
def written_outputs(ending: Ending | None) -> Iterator[None]:
    """Write report and curves during the block, for at most ``OUTPUTS_S``; another signal skips them."""
    deadline = time.monotonic() + OUTPUTS_S
    outputs: list[subprocess.Popen[bytes]] = []
    try:
        with suppress(KeyboardInterrupt):
            outputs = [] if ending is None or count_of_signals() > 1 else ending.start_outputs()
        yield
        while any(each.poll() is None for each in outputs) and time.monotonic() < deadline and count_of_signals() < 2:
            time.sleep(_POLL_S)
    except KeyboardInterrupt:
        pass
    finally:
        for each in outputs:
            each.kill()


def tell_end(ending: Ending | None) -> int:
    """Write the last line of a run that a signal ends, and return its exit code; let no further signal interrupt."""
    ignore_signals()
    name = name_of(signal_of_the_end())
    write_line(f"\n{name if ending is None else ending.last_line()}", "stderr")
    return exit_code()


def exit_code() -> int:
    """Return the exit code of a process that a signal has ended."""
    return CODES[signal.Signals(signal_of_the_end())]


def end_interrupted(ending: Ending, grace: "Grace") -> int:
    """Write the outputs and the last line of a run that trains in this process; return its exit code."""
    grace.close()
    with written_outputs(ending):
        pass
    return tell_end(ending)


def _version(file: Path) -> tuple[int, int, int] | None:
    """Return a value that changes whenever the file is written; None without a file."""
    with suppress(OSError):
        status = file.stat()
        return status.st_mtime_ns, status.st_ino, status.st_size
    return None


class Grace:
    """The seconds after SIGTERM in which a run saves its last full step, if ``is_worth_it``; None if it never does.

    Another SIGTERM ends it, unless it ``takes_all``: torchrun sends one more to a process that has got one already.
    """

    def __init__(
        self, seconds: float | None = None, is_worth_it: Callable[[], bool] = lambda: True, takes_all: bool = False
    ) -> None:
        self._seconds = seconds
        self._is_worth_it = is_worth_it
        self._takes_all = takes_all
        self._is_over = False
        self.has_begun = False

    def begin(self) -> bool:
        """Begin at the first SIGTERM; return whether the run goes on."""
        if self._seconds is None or self._is_over:
            return False
        if self.has_begun:
            return self._takes_all
        self.has_begun = self._is_worth_it()
        if self.has_begun:
            # A Thread would wait for its start, which takes a lock that the interrupted code may hold.
            _thread.start_new_thread(self._end_after, (self._seconds,))
        return self.has_begun

    def _end_after(self, seconds: float) -> None:
        time.sleep(seconds)
        if not self._is_over:
            self._is_over = True
            os.kill(os.getpid(), signal.SIGTERM)

    def close(self) -> None:
        """Let the end of the time interrupt nothing more."""
        self._is_over = True
