"""Watch the processes that a run depends on, while a thread talks to Ray: a call that hangs there delays no message."""

import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import psutil
import ray

from verl.errors import LostProcessError
from verl.trainer.run.ending import Grace
from verl.utils.failures import settle
from verl.utils.observe.activity import ActivityFile
from verl.utils.process.lifetime import WatchedProcess
from verl.utils.temporary import RUN, TemporaryFolder, remove_folders_of_the_dead

T = TypeVar("T")

POLL_S = 0.2
WARN_AFTER_S = 30.0
RAY_TIMEOUT_S = 30.0
"""Seconds that Ray's own processes may be stopped; Ray gives up later, and ends the launching process unannounced."""
_LONGEST_POLL_S = 1.0  # if a poll took longer, this process itself was stopped
_LOSS_GRACE_S = 2.0  # an error of Ray and the death that caused it may show in either order
_LEAVE_S = 3.0
_RAY_PROCESSES = {"gcs_server": "Ray's GCS", "raylet": "Ray's raylet"}


@dataclass
class _Silence:
    """The seconds since a process's last sign of life, and their limit."""

    process: WatchedProcess
    limit_s: float
    seconds: float = 0.0
    is_told: bool = False


class Watch:
    """Watches GCS and raylet, if this process has started them, and the process of the trainer, if it is on this host.

    Of a cluster that this process has joined, it watches whether the GCS answers. The death of a watched process ends
    the run at once. A silent process ends it after a timeout: ``RAY_TIMEOUT_S`` for Ray's own processes, ``timeout_s``
    for the trainer, which writes its activity to ``activity_path``.

    The thread that talks to Ray stops when ``is_over`` is set; ``is_stuck`` tells afterwards that it did not,
    or that Ray cannot end by itself. ``grace`` is the time in which the trainer may save after SIGTERM.
    """

    def __init__(self, timeout_s: float, warn: Callable[[str], None], grace: Grace | None = None) -> None:
        self.grace = grace or Grace()
        self.is_over = threading.Event()
        self.is_stuck = False
        self._timeout_s = timeout_s
        self._warn = warn
        remove_folders_of_the_dead()
        self._folder = TemporaryFolder(RUN)
        self.activity_path = self._folder.path / "activity.json"
        self.activity_path.touch()
        self._activity = ActivityFile(self.activity_path)
        self._modified_ns = 0
        self._trainer: _Silence | None = None
        self._ray = [
            _Silence(WatchedProcess(_RAY_PROCESSES[child.name()], child.pid), min(RAY_TIMEOUT_S, timeout_s))
            for child in psutil.Process().children()
            if child.name() in _RAY_PROCESSES
        ]
        self._questions = 0  # odd while a question waits for its answer
        self._last_question = 0
        self._question_s = 0.0

    @contextmanager
    def question(self) -> Iterator[None]:
        """Mark a call that Ray's GCS answers at once while it lives."""
        self._questions += 1
        try:
            yield
        finally:
            self._questions += 1

    def run(self, talk: Callable[[], T], at_end: Callable[[], None] = lambda: None) -> T:
        """Return the result of ``talk``, which runs in a thread and ends soon after ``is_over`` is set.

        ``at_end`` runs in the same thread afterwards, also if ``talk`` fails.

        Raises: its error; LostProcessError, also in place of an error that follows from the loss.
        """
        outcome: Future[T] = Future()

        def talk_to_the_end() -> T:
            try:
                return talk()
            finally:
                at_end()

        thread = threading.Thread(target=settle, args=(outcome, talk_to_the_end), name="ray", daemon=True)
        thread.start()
        try:
            loss = self._wait_for(outcome)
            if loss is not None:
                raise loss
            return outcome.result()
        finally:
            self.is_over.set()
            thread.join(_LEAVE_S)
            ray_processes = [silence.process for silence in self._ray]
            self.is_stuck = thread.is_alive() or any(each.is_stopped() or each.ending() for each in ray_processes)
            self._folder.remove()

    def _wait_for(self, outcome: "Future[T]") -> LostProcessError | None:
        """Wait for the outcome, or until a needed process is lost; return the loss with the error that it explains."""
        last = time.monotonic()
        while not wait([outcome], timeout=POLL_S).done:
            now = time.monotonic()
            loss = self._check(min(now - last, _LONGEST_POLL_S))
            last = now
            if loss is not None and not wait([outcome], timeout=_LOSS_GRACE_S).done:
                return loss
        error = outcome.exception()
        if not isinstance(error, ray.exceptions.RayError):
            return None
        if isinstance(error, ray.exceptions.RayTaskError):  # from the trainer, which may have ended after it
            loss = self._find_dead(self._ray)
        else:
            self._find_trainer()
            loss = self._find_dead(self._all(), _LOSS_GRACE_S)
        if loss is not None:
            loss.__cause__ = error
            if isinstance(error, ray.exceptions.OutOfMemoryError):
                loss.add_note(str(error).partition("\n")[0])
        return loss

    def _all(self) -> list[_Silence]:
        return self._ray if self._trainer is None else [*self._ray, self._trainer]

    def _check(self, elapsed_s: float) -> LostProcessError | None:
        """Add ``elapsed_s`` to the processes' silence; return the loss of one that died or is silent too long."""
        self._find_trainer()
        loss = self._find_dead(self._all())
        for silence in self._ray:
            loss = loss or self._count(silence, elapsed_s, answers=not silence.process.is_stopped())
        if self._trainer is not None:
            modified_ns = self._activity.modified_ns()
            loss = loss or self._count(self._trainer, elapsed_s, answers=modified_ns != self._modified_ns)
            self._modified_ns = modified_ns
        return loss or self._count_question(elapsed_s)

    def _count_question(self, elapsed_s: float) -> LostProcessError | None:
        """Return the loss of the GCS when the same question has waited for too long."""
        number = self._questions
        is_same = number % 2 == 1 and number == self._last_question
        self._last_question = number
        self._question_s = self._question_s + elapsed_s if is_same else 0.0
        limit_s = min(RAY_TIMEOUT_S, self._timeout_s)
        return None if self._question_s < limit_s else self._loss("Ray's GCS", f"has not answered for {limit_s:.0f} s")

    def _find_trainer(self) -> None:
        activity = None if self._trainer is not None else self._activity.read()
        if activity is not None and activity.host == socket.gethostname():
            self._trainer = _Silence(WatchedProcess("the trainer process", activity.pid), self._timeout_s)

    def _find_dead(self, watched: Sequence[_Silence], patience_s: float = 0.0) -> LostProcessError | None:
        """Return the loss of the first process that has died, or dies within ``patience_s``."""
        deadline = time.monotonic() + patience_s
        while True:
            for silence in watched:
                ending = silence.process.ending()
                if ending is not None:
                    return self._loss(silence.process, ending)
            if time.monotonic() >= deadline:
                return None
            time.sleep(POLL_S)

    def _count(self, silence: _Silence, elapsed_s: float, answers: bool) -> LostProcessError | None:
        """Update the silence of a process; warn if it is long, return the loss if it is too long."""
        silence.seconds = 0.0 if answers else silence.seconds + elapsed_s
        if silence.seconds < min(WARN_AFTER_S, silence.limit_s):
            return None
        why = ": it is stopped (SIGSTOP)" if silence.process.is_stopped() else ""
        loss = self._loss(silence.process, f"has not answered for {silence.seconds:.0f} s{why}")
        if silence.seconds >= silence.limit_s:
            return loss
        if not silence.is_told:
            silence.is_told = True
            self._warn(f"WARNING: {loss}; the run ends if that goes on for {silence.limit_s - silence.seconds:.0f} s")
        return None

    def _loss(self, process: WatchedProcess | str, what: str) -> LostProcessError:
        activity = self._activity.read()
        where = f"the trainer was {activity}" if activity else "no trainer on this machine has told its phase"
        return LostProcessError(f"{process} {what}; {where}")


def ended_within(seconds: float, call: Callable[[], T]) -> bool:
    """Make a call that may hang, in a thread; return whether it ended in time, and before another Ctrl-C."""

    def attempt() -> None:
        with suppress(Exception):  # the call ends something that may have ended already
            call()

    thread = threading.Thread(target=attempt, name="ending", daemon=True)
    try:
        thread.start()
        thread.join(seconds)
    except KeyboardInterrupt:  # the user does not wait
        return False
    return not thread.is_alive()
