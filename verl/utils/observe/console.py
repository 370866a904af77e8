"""The console logger: lines for the person who watches a run, separate from the library's log."""

import logging
import sys
from collections.abc import Callable


def _to_stdout(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # looked up at each call, because Ray and pytest replace it
    sys.stdout.flush()


class _ConsoleHandler(logging.Handler):
    """Passes formatted lines to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[str], None] = _to_stdout

    def emit(self, record: logging.LogRecord) -> None:
        self.write(self.format(record))


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
