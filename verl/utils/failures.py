"""Guards around code that may raise errors of any class: libraries, remote code of models, classes of users."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from concurrent.futures import Future

T = TypeVar("T")


def settle(outcome: "Future[T]", call: Callable[[], T]) -> None:
    """Call a function, and pass its result or its error to a future."""
    try:
        outcome.set_result(call())
    except BaseException as error:  # whoever waits raises it; an error that is lost here leaves them waiting for ever
        outcome.set_exception(error)


@contextmanager
def on_failure(then: Callable[[BaseException], None]) -> Iterator[None]:
    """Call ``then`` with the error that ends the enclosed code, and raise that error."""
    try:
        yield
    except BaseException as error:  # an interrupt or a cancelled task needs the clean-up too
        then(error)
        raise


@contextmanager
def replacing_errors(
    make: Callable[[Exception], Exception], passes: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Raise ``make(error)`` in place of an error of the enclosed code.

    Args: ``passes`` are the classes of errors that already say what is wrong; they are raised unchanged.
    """
    try:
        yield
    except passes:
        raise
    except Exception as error:  # the enclosed code raises any class
        raise make(error) from error


@contextmanager
def only_warning(logger: logging.Logger, text: str, *values: str | int, trace: bool = False) -> Iterator[None]:
    """Log an error of the enclosed code as a warning and go on after that code.

    Args: ``text`` is a format for ``values``. The warning ends with the class and message of the error, or, with
        ``trace``, it is followed by the stack trace.
    """
    try:
        yield
    except Exception as error:  # the enclosed code raises any class, and the run does not depend on it
        if trace:
            logger.warning(text, *values, exc_info=True)
        else:
            logger.warning(f"{text}: %s: %s", *values, type(error).__name__, error)
