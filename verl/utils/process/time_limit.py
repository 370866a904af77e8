"""Limit the time of a call in this process, and call code of the user that may do anything."""

import ctypes
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable
from functools import cache
from types import FrameType, TracebackType
from typing import Self, TypeVar

from verl.utils.unavailable import is_unavailable

T = TypeVar("T")

IMPORT_TIMEOUT_S = 300.0
"""Seconds that a module of the user gets for its import."""
WATCHER = "time-limit"
"""Name of the thread that watches the limits; it waits, and holds nothing."""
REPEAT_S = 1.0  # code that catches every exception is interrupted again
_SIGNAL = signal.SIGRTMAX - 3  # not SIGALRM, because the limited code may use alarms
Handler = Callable[[int, FrameType | None], object]


class TimeLimitExceeded(BaseException):
    """The body exceeded its time limit. Not an ``Exception``, so that the body does not catch it by accident."""


class UserCodeFailed(RuntimeError):
    """Code of the user did not return: the message begins with a verb, such as ``raised``; ``trace`` is its stack.

    ``is_unavailable`` says that it lacked a service, as ``verl.utils.unavailable`` tells.
    """

    def __init__(self, message: str, trace: str = "", is_unavailable: bool = False) -> None:
        super().__init__(message)
        self.trace = trace
        self.is_unavailable = is_unavailable


def call_within(seconds: float, call: Callable[[], T]) -> T:
    """Call code of the user under a time limit.

    Raises: UserCodeFailed for all that it raises, SystemExit and KeyboardInterrupt too; TimeLimitExceeded after
        ``seconds``; KeyboardInterrupt for a real Ctrl-C.
    """
    with time_limit(seconds) as limit:
        try:
            return call()
        except (TimeLimitExceeded, UserCodeFailed):
            raise
        except BaseException as error:  # code of the user may raise anything, also SystemExit
            if limit.interrupted:
                raise
            text = f"raised {error_text(error)}"
            raise UserCodeFailed(text, traceback.format_exc(), is_unavailable(error)) from error


def import_within_limit(run: Callable[[], T]) -> T:
    """Run an import of code of the user.

    Raises: RuntimeError with the error of the code, which may be one that ends a process, or with the time limit.
    """
    try:
        return call_within(IMPORT_TIMEOUT_S, run)
    except TimeLimitExceeded as error:
        raise RuntimeError(f"its import did not end within {IMPORT_TIMEOUT_S:g} s") from error
    except UserCodeFailed as error:
        raise RuntimeError(error_text(error.__cause__ or error)) from error.__cause__


def error_text(error: BaseException) -> str:
    """Return type and message of an error; the type alone if its ``__str__`` raises."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # a class of the user may raise anything
        return f"{type(error).__name__}, whose message cannot be read"


def time_limit(seconds: float) -> "_Limit":
    """Return a context manager that raises ``TimeLimitExceeded`` in its body after ``seconds``.

    In the main thread a signal interrupts waiting calls too. In other threads only Python code is interrupted, between
    two bytecode instructions. Neither ends compiled code that does not return, or a loop that catches every exception:
    ``IsolatedFunction`` calls such code in a process.

    A Ctrl-C in the body is raised again after a body that swallows it; the attribute ``interrupted`` records it.
    """
    return _Limit(seconds)


class _Limit:
    """The time limit of one body of code.

    Attributes: ``is_armed`` while the body may be interrupted; ``is_exceeded`` from its deadline on; ``interrupted``
        whether Ctrl-C was pressed during the body.
    """

    def __init__(self, seconds: float) -> None:
        self.due = time.monotonic() + seconds
        self.thread = threading.get_ident()
        self.in_main = threading.current_thread() is threading.main_thread()
        self.is_armed = True
        self.is_exceeded = False
        self.interrupted = False
        self._lock = threading.Lock()
        self._on_interrupt: Handler | int | None = None

    def __enter__(self) -> Self:
        if self.in_main:
            _install_handler()
            _limits.append(self)
            self._on_interrupt = signal.getsignal(signal.SIGINT)
            if callable(self._on_interrupt):
                signal.signal(signal.SIGINT, self._note_interrupt)
        _watcher.add(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.is_armed = False
        _watcher.remove(self)
        if not self.in_main:
            with self._lock:  # the watcher does not interrupt after this
                is_interrupted = self.is_exceeded
            if is_interrupted:
                _take_back()
            return
        _limits.remove(self)
        if callable(self._on_interrupt):
            signal.signal(signal.SIGINT, self._on_interrupt)
        if self.interrupted and kind is not KeyboardInterrupt:
            raise KeyboardInterrupt

    def interrupt(self) -> None:
        """Raise ``TimeLimitExceeded`` in the body; called by the watcher at the deadline and repeatedly after it."""
        self.is_exceeded = True
        # A signal also ends a system call that waits, such as a read; an asynchronous exception is raised after it
        # only.
        if self.in_main:
            signal.pthread_kill(self.thread, _SIGNAL)
            return
        with self._lock:
            if self.is_armed:
                _set_exception(self.thread)

    def _note_interrupt(self, number: int, frame: FrameType | None) -> None:
        self.interrupted = True
        assert callable(self._on_interrupt)
        self._on_interrupt(number, frame)


def _set_exception(thread: int) -> None:
    """Let a thread raise ``TimeLimitExceeded`` at its next function call or loop, unless one is already pending."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeLimitExceeded))


def _take_back() -> None:
    """Raise and catch an exception that is still pending in this thread, so that it cannot reach later code.

    Setting None would withdraw the exception too, but CPython until 3.11 then takes one to be pending for ever, and a
    debugger or a profiler never gets beyond its next function call, in any thread.
    """
    try:
        _set_exception(threading.get_ident())
        while True:
            pass
    except TimeLimitExceeded:
        return


_limits: list[_Limit] = []
"""The limits of the main thread, the innermost one last."""


@cache
def _install_handler() -> None:
    """Install the handler for good, because by default a late signal would kill the process."""
    signal.signal(_SIGNAL, _raise)


def _raise(number: int, frame: FrameType | None) -> None:
    if not any(limit.is_armed and limit.is_exceeded for limit in _limits):
        return
    while frame is not None:
        if frame.f_code in (_Limit.__enter__.__code__, _Limit.__exit__.__code__):
            return  # a limit begins or ends, which must complete; the next signals come soon
        frame = frame.f_back
    raise TimeLimitExceeded


class _Watcher:
    """A thread that interrupts bodies at their deadlines; it is started once and serves all threads of the process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._wakes: dict[_Limit, float] = {}
        self._sleeps_until = 0.0
        self._is_started = False

    def add(self, limit: _Limit) -> None:
        with self._changed:
            self._wakes[limit] = limit.due
            if not self._is_started:
                self._is_started = True
                threading.Thread(target=self._watch, name=WATCHER, daemon=True).start()
            elif limit.due < self._sleeps_until:  # only an earlier limit has to wake the thread
                self._changed.notify()

    def remove(self, limit: _Limit) -> None:
        with self._changed:
            self._wakes.pop(limit, None)

    def _watch(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                self._wakes = {limit: wake for limit, wake in self._wakes.items() if limit.is_armed}
                for limit in [limit for limit, wake in self._wakes.items() if wake <= now]:
                    self._wakes[limit] = now + REPEAT_S
                    limit.interrupt()
                self._sleeps_until = min(self._wakes.values(), default=float("inf"))
                left = self._sleeps_until - now
                self._changed.wait(min(left, threading.TIMEOUT_MAX))


_watcher = _Watcher()


def _start_anew() -> None:
    """Forget the watcher of the parent, whose thread a forked process does not have."""
    global _watcher
    _watcher = _Watcher()
    _limits.clear()


os.register_at_fork(after_in_child=_start_anew)
