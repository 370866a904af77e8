"""The console logger: lines for the person who watches a run, separate from the library's log."""

import logging
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
        with suppress(OSError):  # such as a log on a full disk: no line may end a run
            sys.stdout.write(f"{self.format(record)}\n")
            sys.stdout.flush()


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
