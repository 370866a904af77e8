"""The message of a refused input, as the terminal shows it."""

import sys
from tempfile import NamedTemporaryFile
from typing import NoReturn

from verl.base_config import PROBLEM
from verl.trainer.config.invocation import only_checks
from verl.utils.masking import masked_text

USAGE_ERROR = 2
MOST_LINES = 5
MOST_CHARACTERS = 1000
"""The most lines of a message in the terminal, and the most characters of such a line."""
MOST_PROBLEMS = 20
"""The most problems that the terminal shows; a file takes them all if there are more."""


def leave_refused(error: Exception | str) -> NoReturn:
    """End the command with the message of a refused input, and exit code 2."""
    sys.stderr.write(f"{masked_text(problems_shown(error))}\n")
    sys.exit(USAGE_ERROR)


def problems_shown(error: Exception | str) -> str:
    """Return the message of a refused input for the terminal.

    More problems than it shows go to a temporary file, which it names; with ``--check``, which writes none, it shows
    all.
    """
    lines = f"error in the configuration: {error}".splitlines()
    problems = [line for line in lines if line.startswith(PROBLEM)]
    notes = getattr(error, "__notes__", [])
    if not problems:
        return "\n".join([brief("\n".join(lines)), *notes])
    shown = lines if only_checks() or len(problems) <= MOST_PROBLEMS else lines[: MOST_PROBLEMS + 1]
    more = []
    if len(lines) > len(shown):
        try:
            more = [f"  ... and {len(lines) - len(shown)} more, in {_saved(lines)}"]
        except OSError:  # for instance a full disk
            shown = lines
    return "\n".join([brief("\n".join(shown), len(shown)), *more, *notes])


def _saved(lines: list[str]) -> str:
    """Write lines to a temporary file of the user and return its path."""
    with NamedTemporaryFile("w", prefix="verl-problems-", suffix=".txt", delete=False, encoding="utf-8") as file:
        file.write(masked_text("\n".join(lines) + "\n"))
    return file.name


def brief(message: str, most_lines: int = MOST_LINES) -> str:
    """Shorten a message for the terminal, and remove its empty lines."""
    lines = [line.rstrip() for line in message.splitlines() if line.strip()]
    if len(lines) > most_lines:
        lines = [*lines[: most_lines - 1], f"  ... and {len(lines) - most_lines + 1} more lines"]
    return "\n".join(line if len(line) <= MOST_CHARACTERS else f"{line[:MOST_CHARACTERS]} ..." for line in lines)
