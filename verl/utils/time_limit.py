"""Limit the time of a call in this process."""

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_S = 1.0  # code that catches every exception is interrupted again
_SIGNAL = signal.SIGRTMAX - 3  # not SIGALRM, because the limited code may use alarms


class TimeLimitExceeded(BaseException):
    """The body exceeded its time limit. Not an ``Exception``, so that the body does not catch it by accident."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitExceeded`` in the body after ``seconds``.

    In the main thread a signal interrupts waiting calls too. In other threads only Python code is interrupted, between
    two bytecode instructions. Neither interrupts compiled code that does not return.
    """
    in_main = threading.current_thread() is threading.main_thread()
    interrupt, clean_up = _by_signal() if in_main else _by_exception()
    done = threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            interrupt()
            wait = REPEAT_S

    threading.Thread(target=watch, name="time-limit", daemon=True).start()
    try:
        yield
    finally:
        clean_up()
        done.set()


Hooks = tuple[Callable[[], None], Callable[[], None]]


def _by_signal() -> Hooks:
    thread = threading.get_ident()
    armed = [True]

    def handle(number: int, frame: FrameType | None) -> None:
        if armed[0]:
            raise TimeLimitExceeded

    previous = signal.signal(_SIGNAL, handle)

    def interrupt() -> None:
        if armed[0]:
            signal.pthread_kill(thread, _SIGNAL)

    def clean_up() -> None:
        armed[0] = False
        # a late signal must find a handler, because by default it would kill the process
        signal.signal(_SIGNAL, previous if callable(previous) else signal.SIG_IGN)

    return interrupt, clean_up


def _by_exception() -> Hooks:
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    armed = [True]

    def interrupt() -> None:
        with lock:
            if armed[0]:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimitExceeded))

    def clean_up() -> None:
        with lock:
            armed[0] = False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)

    return interrupt, clean_up
