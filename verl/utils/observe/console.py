"""The lines that a run writes for the person who watches it, apart from the log of the library."""

import logging
import sys
from collections.abc import Callable


def _to_stdout(text: str) -> None:
    sys.stdout.write(f"{text}\n")  # whatever it is at this moment: Ray and pytest replace it
    sys.stdout.flush()


class _ConsoleHandler(logging.Handler):
    """Hand finished lines to a function."""

    def __init__(self) -> None:
        super().__init__()
        self.write: Callable[[str], None] = _to_stdout

    def emit(self, record: logging.LogRecord) -> None:
        self.write(self.format(record))


_handler = _ConsoleHandler()


def get_console() -> logging.Logger:
    """Return the logger whose messages appear on standard output as they are."""
    console = logging.getLogger("verl.console")
    if not console.handlers:
        console.addHandler(_handler)
        console.setLevel(logging.INFO)
        console.propagate = False
    return console


def send_console_to(write: Callable[[str], None]) -> None:
    """Hand the console's lines of this process to a function from now on."""
    _handler.write = write
