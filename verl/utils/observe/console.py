"""The console logger: lines for the person who watches a run, separate from the library's log."""

import atexit
import functools
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress


class _ConsoleHandler(logging.Handler):
    """Passes formatted lines to a function, or writes them to standard output."""

    write: Callable[[str], None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if self.write is not None:
            self.write(self.format(record))
            return
        write_line(self.format(record))


_handler = _ConsoleHandler()


def get_console() -> logging.Logger:
    """Return the logger that writes messages to standard output without a prefix."""
    console = logging.getLogger("verl.console")
    if not console.handlers:
        console.addHandler(_handler)
        console.setLevel(logging.INFO)
        console.propagate = False
    return console


def send_console_to(write: Callable[[str], None]) -> None:
    """Redirect this process's console lines to a function."""
    _handler.write = write


# ---- standard streams that cannot be written: no line may end a run


def write_line(text: str, name: str = "stdout") -> OSError | None:
    """Write a line to a standard stream; return the error if it cannot be written, such as to a full disk."""
    let_no_stream_fail()
    stream = getattr(sys, name)
    try:
        stream.write(f"{text}\n")
        stream.flush()
    except OSError as error:
        return error
    return None


def place_of(name: str) -> str:
    """Return the destination of a standard stream: a path, a pipe, or else its name."""
    with suppress(OSError, ValueError):
        return os.readlink(f"/proc/self/fd/{getattr(sys, name).fileno()}")
    return name


@functools.cache
def let_no_stream_fail() -> None:
    """Open missing standard streams, and keep the exit code if a stream cannot be written at the end.

    Python flushes both at the end, and if that fails it ends with code 120.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the shell (>&-)
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
    atexit.register(_drop_unwritten)


def _drop_unwritten() -> None:
    for name in ("stdout", "stderr"):
        try:
            getattr(sys, name).flush()
        except (OSError, ValueError):  # ValueError: closed
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
