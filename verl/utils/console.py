"""The lines that a run writes for the person who watches it, apart from the log of the library."""

import logging
import sys


class _CurrentStdout(logging.StreamHandler):  # type: ignore[type-arg]
    """Write to whatever ``sys.stdout`` is now: Ray and pytest replace it."""

    @property
    def stream(self) -> object:
        """The stream of this moment."""
        return sys.stdout

    @stream.setter
    def stream(self, value: object) -> None:
        del value


def get_console() -> logging.Logger:
    """Return the logger whose messages appear on standard output as they are."""
    console = logging.getLogger("verl.console")
    if not console.handlers:
        handler = _CurrentStdout()
        handler.setFormatter(logging.Formatter("%(message)s"))
        console.addHandler(handler)
        console.setLevel(logging.INFO)
        console.propagate = False
    return console
