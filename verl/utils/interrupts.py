"""Let no Ctrl-C be lost, whatever the main thread does when it comes.

Python turns the signal into a KeyboardInterrupt wherever the main thread is. In a function that C code calls back, such
as a hook of a fork or of garbage, it is printed as "Exception ignored", and the program goes on. In the hook that
releases the lock of ``logging`` after a fork, which Ray's start makes for each of its processes, it also leaves that
lock taken: every other thread that logs then waits for ever.
"""

import _thread
import os
import signal
import sys
import threading
import time
from types import FrameType
from typing import Any

_AGAIN_S = 0.05
"""Seconds until a signal that came at a wrong moment is sent again: a fork takes some milliseconds."""

_is_forking = False
_is_installed = False
_last = int(signal.SIGINT)
_report_others: Any = sys.unraisablehook


def keep_interrupts() -> None:
    """Raise the KeyboardInterrupt of a Ctrl-C again if it was lost, and none in the hooks of a fork.

    Does nothing outside the main thread, or where Ctrl-C is ignored or has a handler of the caller.
    """
    global _is_installed, _report_others
    if threading.current_thread() is not threading.main_thread():
        return
    if not _is_installed:  # the hooks that were registered last are the outermost ones
        _is_installed = True
        os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_end_fork)
        _report_others, sys.unraisablehook = sys.unraisablehook, _report
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _on_interrupt)


def interrupt(number: int) -> None:
    """Raise KeyboardInterrupt in the handler of a signal, or send the signal again if a fork is under way."""
    global _last
    _last = number
    if not _is_forking:
        raise KeyboardInterrupt
    _send_again(number)


def _on_interrupt(number: int, frame: FrameType | None) -> None:
    interrupt(number)


def _begin_fork() -> None:
    global _is_forking
    _is_forking = True


def _end_fork() -> None:
    global _is_forking
    _is_forking = False


def _report(unraisable: Any) -> None:
    """Report an exception that nobody can catch, unless it is an interruption, which comes again."""
    if unraisable.exc_type is KeyboardInterrupt:
        _send_again(_last)
    else:
        _report_others(unraisable)


def _send_again(number: int) -> None:
    # A Thread would wait for its start, which takes a lock that the interrupted code may hold.
    _thread.start_new_thread(_send, (number,))


def _send(number: int) -> None:
    time.sleep(_AGAIN_S)
    os.kill(os.getpid(), number)
