"""The command lines of the small commands."""

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from verl.utils.terminal_text import as_typed, escape_in_terminal, locale_problem


class OneLineParser(argparse.ArgumentParser):
    """A parser whose errors are one line, without the usage of the command."""

    def parse_known_args(  # type: ignore[override]  # typeshed has a signature for each class of namespace
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """Refuse arguments that the locale cannot read, and parse the others."""
        escape_in_terminal()
        words = sys.argv[1:] if args is None else args
        for word in words:
            if problem := locale_problem(word):
                self.error(f"{as_typed(word)!r} {problem}")
        return super().parse_known_args(words, namespace)

    def error(self, message: str) -> NoReturn:
        """End with exit code 2."""
        self.exit(2, f"error: {message}; --help lists the arguments\n")
