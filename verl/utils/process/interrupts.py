"""Signals that end a run: none is lost or counted twice, whatever the main thread does at that moment.

Python turns Ctrl-C into a KeyboardInterrupt wherever the main thread is. In a function that C code calls back, such
as a hook of a fork or of garbage, it is printed as "Exception ignored", and the program goes on. In the hook that
releases the lock of ``logging`` after a fork (Ray's start forks for each of its processes), Ctrl-C also leaves that
lock taken: every other thread that logs then waits for ever. A second Ctrl-C interrupts the clean-up after the first.
"""

import _thread
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from verl.starting import last_words, leave_at_once
from verl.utils import envs
from verl.utils.masking import masked_text
from verl.utils.observe.console import write_line

_AGAIN_S = 0.05
"""Seconds until a signal that came at a wrong moment is sent again: a fork takes some milliseconds."""
_QUICK_S = 1.0
"""Signals that come so soon after one that has interrupted the program do not interrupt its end; they count."""
CODES = {signal.SIGINT: 130, signal.SIGTERM: 143}
"""Exit code of a run that a signal ends."""

_USUAL: dict[int, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
_is_forking = False
_is_installed = False
_last = int(signal.SIGINT)
_count = 0
_raised_s: float | None = None
_goes_on: Callable[[], bool] | None = None
_report_others: Any = sys.unraisablehook


def keep_interrupts() -> None:
    """Raise the KeyboardInterrupt of a Ctrl-C again if it was lost, and none in the hooks of a fork.

    Does nothing outside the main thread, or where Ctrl-C is ignored or has a handler of the caller.
    """
    global _is_installed, _report_others
    if threading.current_thread() is not threading.main_thread():
        return
    if not _is_installed:  # registered late, since the last registered hooks are the outermost ones
        _is_installed = True
        os.register_at_fork(before=_begin_fork, after_in_parent=_end_fork, after_in_child=_begin_child)
        _report_others = sys.unraisablehook
        sys.unraisablehook = _report
    if signal.getsignal(signal.SIGINT) in (signal.default_int_handler, leave_at_once):
        signal.signal(signal.SIGINT, _on_signal)


def catch_signals() -> None:
    """Raise KeyboardInterrupt at SIGTERM too, and lose none; Python allows this in the main thread only."""
    global _count, _raised_s
    _count = 0
    _raised_s = None
    keep_interrupts()
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _on_signal)


@contextmanager
def caught_signals() -> Iterator[None]:
    """Catch signals in the block, which is the work of a command; see ``catch_signals``."""
    before = {number: signal.getsignal(number) for number in CODES}
    catch_signals()
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                if handler is not leave_at_once and signal.getsignal(number) is _on_signal:
                    signal.signal(number, handler)


def ignore_signals() -> None:
    """Let nothing interrupt the last lines of a run."""
    if threading.current_thread() is threading.main_thread():
        for number in CODES:
            signal.signal(number, signal.SIG_IGN)


@contextmanager
def going_on(begin: Callable[[], bool]) -> Iterator[None]:
    """At each SIGTERM in the block, ask ``begin`` whether the run continues in order to save; else interrupt it."""
    global _goes_on
    _goes_on = begin
    try:
        yield
    finally:
        _goes_on = None


def signal_of_the_end() -> int:
    """Return the signal that has interrupted this process."""
    return _last


def count_of_signals() -> int:
    """Return the number of received signals that end this process."""
    return _count


def interrupt(number: int) -> None:
    """Raise KeyboardInterrupt in the handler of a signal, or send the signal again if a fork is under way."""
    global _last, _count, _raised_s
    # An exception here would surface in a hook of the fork, where nobody can catch it; sent again, it counts once.
    if _is_forking:
        _count -= 1
        _send_again(number)
        return
    now = time.monotonic()
    if _raised_s is None or now - _raised_s > _QUICK_S:
        _last = number
        _raised_s = now
        raise KeyboardInterrupt


def _on_signal(number: int, frame: FrameType | None) -> None:
    global _count, _last
    _count += 1
    if number == signal.SIGTERM and _goes_on is not None and _goes_on():
        _last = number
    else:
        interrupt(number)


def _begin_fork() -> None:
    global _is_forking
    _is_forking = True


def _end_fork() -> None:
    global _is_forking
    _is_forking = False


def _begin_child() -> None:
    """Let signals end a forked process, which must not clean up the resources of its parent."""
    _end_fork()
    for number, usual in _USUAL.items():
        if signal.getsignal(number) is _on_signal:
            signal.signal(number, usual)


def _report(unraisable: Any) -> None:
    """Report an exception that nobody can catch, unless it is an interruption, which is raised again later."""
    global _count, _raised_s
    if unraisable.exc_type is KeyboardInterrupt:
        _count = _count - 1
        _raised_s = None
        _send_again(_last)
    else:
        _report_others(unraisable)


def _send_again(number: int) -> None:
    # A Thread would wait for its start, which takes a lock that the interrupted code may hold.
    _thread.start_new_thread(_send, (number,))


def _send(number: int) -> None:
    time.sleep(_AGAIN_S)
    os.kill(os.getpid(), number)


# ---- the last lines of a run


def name_of(number: int) -> str:
    """Return the word for a signal in messages."""
    return "terminated" if number == signal.SIGTERM else "interrupted"


def leave_before_the_run() -> NoReturn:
    """End a command that a signal has interrupted before its run has begun."""
    ignore_signals()
    text, code = last_words(_last)
    write_line(text, "stderr")
    sys.exit(code)


def is_of_torchrun() -> bool:
    """Whether torchrun has started this process."""
    return envs.read("TORCHELASTIC_RUN_ID") is not None


def command_line(changes: tuple[str, ...] = ()) -> str:
    """Return the command that has started this process, or its torchrun; keys in ``changes`` have other values."""
    words = list(sys.orig_argv)
    if is_of_torchrun():
        words = (
            Path(f"/proc/{os.getppid()}/cmdline")
            .read_text(encoding="utf-8", errors="replace")
            .removesuffix("\0")
            .split("\0")
        )
    keys = tuple(change.partition("=")[0] for change in changes)
    kept = [word for word in words if word.lstrip("+").partition("=")[0] not in keys]
    return masked_text(" ".join(map(_quoted, [*kept, *changes])))


def _quoted(word: str) -> str:
    """Quote a word for a shell, on one line."""
    if word.isprintable():
        return shlex.quote(word)
    kept = [char if char.isprintable() and char not in "\\'" else f"\\U{ord(char):08x}" for char in word]
    return f"$'{''.join(kept)}'"
