"""Signal handling while a command imports its modules: a signal prints one line instead of Python's trace.

``verl`` imports this module before any other, so it imports nothing itself that takes time.
"""

import os
import signal
import sys
import threading
from types import FrameType

_COMMANDS = ("verl.trainer.", "recipe.")


def leave_at_once_while_importing() -> None:
    """Let Ctrl-C and SIGTERM end a command at once, since it has nothing to clean up yet.

    Does nothing in a process that ``python -m`` has not started with a command of this package, or where the caller
    has handlers. ``verl.utils.process.interrupts`` replaces these when the work of the command begins.
    """
    words = sys.orig_argv
    module = words[words.index("-m") + 1 :][:1] if "-m" in words else []
    if not module or not module[0].startswith(_COMMANDS) or threading.current_thread() != threading.main_thread():
        return
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL)):
        if signal.getsignal(number) is usual:
            signal.signal(number, leave_at_once)


def leave_at_once(number: int, frame: FrameType | None) -> None:
    """End this process; a handler of signals."""
    text, code = last_words(number)
    os.write(2, f"{text}\n".encode())
    os._exit(code)


def last_words(number: int) -> tuple[str, int]:
    """Return the line and the exit code of a command that a signal ends before its run has begun."""
    name, code = ("terminated", 143) if number == signal.SIGTERM else ("interrupted", 130)
    return f"\n{name} before the run began: nothing is lost, and the same command starts it", code
