"""Collect the problems that the checks before a start find, and raise them in one message. Imports no Ray."""

import logging
import sys
import traceback
from collections.abc import Callable, Iterable
from typing import Any, NoReturn, ParamSpec, TypeVar

from omegaconf.errors import OmegaConfBaseException

from verl.base_config import ConfigError, problem_list
from verl.errors import WrongInput
from verl.trainer.config.invocation import only_checks, refused_keys
from verl.trainer.config.problems import USAGE_ERROR, brief, problems_shown
from verl.utils.masking import masked_text
from verl.utils.observe.console import write_line
from verl.utils.process.interrupts import leave_before_the_run

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

INPUT_ERRORS = (ValueError, OSError, ImportError, OmegaConfBaseException)
"""What a check before the start raises for an input that it refuses."""


class SeveralProblems(WrongInput):
    """Several checks have refused something; ``errors`` are theirs."""

    def __init__(self, errors: Iterable[Exception]) -> None:
        self.errors = list(errors)
        super().__init__(problem_list(line for error in self.errors for line in _problems(error)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.errors,)


def _problems(error: Exception) -> list[str]:
    if isinstance(error, SeveralProblems):
        return [line for each in error.errors for line in _problems(each)]
    if isinstance(error, ConfigError):
        return [str(violation) for violation in error.violations]
    return [" ".join(str(error).split())]


class Findings:
    """Runs all checks and keeps the problems that they raise."""

    def __init__(self) -> None:
        self.errors: list[Exception] = []

    def passes(self, check: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> bool:
        """Run a check and return whether it refuses nothing; its error is kept."""
        try:
            check(*args, **kwargs)
        except INPUT_ERRORS as error:
            self.errors.append(error)
            return False
        return True

    def refuse(self) -> None:
        """Raise the problems: a single error unchanged, several as ``SeveralProblems``, each once."""
        errors = [*{str(error): error for error in self.errors}.values()]
        if len(errors) == 1:
            raise errors[0]
        if errors:
            raise SeveralProblems(errors)


def checked(check: Callable[[], T]) -> T:
    """Return the result of the checks before the start of Ray, which include keys that the command line has refused.

    Raises: SystemExit with 2 after a message on standard error if they refuse the input; with 1 after the trace if a
        check itself is wrong.
    """
    findings = Findings()
    if refused_keys():
        findings.errors.append(ConfigError(refused_keys()))
    results: list[T] = []
    try:
        findings.passes(lambda: results.append(check()))
        findings.refuse()
        return results[0]
    except KeyboardInterrupt:
        leave_before_the_run()
    except INPUT_ERRORS as error:
        leave(problems_shown(error), USAGE_ERROR)
    except Exception as error:  # a bug of ours: the trace is what its report needs
        named = brief(f"{type(error).__name__}: {error}")
        leave(f"{traceback.format_exc()}\nError: a check before the start has a bug, please report it: {named}", 1)


def end_of_checks() -> None:
    """Say that all checks have passed, and with ``--check`` end the command."""
    if only_checks():
        write_line("passed all checks")
        sys.exit(0)
    logger.info("passed all checks")


def leave(message: str, code: int) -> NoReturn:
    """End this process with a message on standard error and an exit code."""
    write_line(f"\n{masked_text(message)}", "stderr")
    sys.exit(code)
