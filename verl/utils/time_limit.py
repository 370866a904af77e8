"""A limit on the time of a call in this process."""

import ctypes
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

REPEAT_S = 1.0  # code that catches everything is interrupted again
_SIGNAL = signal.SIGRTMAX - 3  # not SIGALRM: the code under the limit may use alarms of its own


class TimeLimitExceeded(BaseException):
    """The body took longer than it may. Not an ``Exception``, so that the body does not catch it by accident."""


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Interrupt the body by ``TimeLimitExceeded`` after that many seconds.

    In the main thread a signal ends waiting too; in others only Python code can be interrupted, between two of its
    instructions. Compiled code that does not return is not interrupted in either.
    """
    in_main = threading.current_thread() is threading.main_thread()
    interrupt, clean_up = _by_signal() if in_main else _by_exception()
    done = threading.Event()

    def watch() -> None:
        wait = seconds
        while not done.wait(wait):
            interrupt()
            wait = REPEAT_S

    watchdog = threading.Thread(target=watch, name="time-limit", daemon=True)
    watchdog.start()
    try:
        yield
    finally:
        clean_up()
        done.set()


Hooks = tuple[Callable[[], None], Callable[[], None]]


def _by_signal() -> Hooks:
    thread, armed = threading.get_ident(), [True]

    def handle(number: int, frame: FrameType | None) -> None:
        if armed[0]:
            raise TimeLimitExceeded

    previous = signal.signal(_SIGNAL, handle)

    def interrupt() -> None:
        if armed[0]:
            signal.pthread_kill(thread, _SIGNAL)

    def clean_up() -> None:
        armed[0] = False
        # a late signal must find a handler: by default it would end the process
        signal.signal(_SIGNAL, previous if callable(previous) else signal.SIG_IGN)

    return interrupt, clean_up


def _by_exception() -> Hooks:
    thread, lock, armed = ctypes.c_ulong(threading.get_ident()), threading.Lock(), [True]

    def interrupt() -> None:
        with lock:
            if armed[0]:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(TimeLimitExceeded))

    def clean_up() -> None:
        with lock:
            armed[0] = False
            ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)

    return interrupt, clean_up
