"""Texts that are not ASCII, under a locale that lacks them: LC_ALL=C with PYTHONUTF8=0, for instance."""

import io
import sys

from verl.utils import envs


def escape_in_terminal() -> None:
    """Make the standard streams of this process and its children escape characters that their encoding lacks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.encoding.lower() != "utf-8":
            stream.reconfigure(errors="backslashreplace")
            envs.write({"PYTHONIOENCODING": f"{stream.encoding}:backslashreplace"})


def locale_problem(text: str) -> str | None:
    """Return the fault of a path that this locale does not decode as UTF-8, as other libraries do; else None."""
    encoding = sys.getfilesystemencoding()
    if encoding == "utf-8" or text.isascii():
        return None
    return f"is not ASCII, and this Python reads names of files as {encoding}: set PYTHONUTF8=1, or LC_ALL=C.UTF-8"


def as_typed(text: str) -> str:
    """Return a text of the command line with the characters that the locale lacks."""
    return text.encode(errors="surrogateescape").decode(errors="replace")
