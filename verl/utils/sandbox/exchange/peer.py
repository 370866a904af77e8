"""One end of the exchange: it asks the other process, and answers it while it waits.

Messages alternate: each is a question or the answer to the last open question. An answer may take further questions,
since a test can pass its own functions to the program.
"""

import fcntl
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from io import StringIO
from typing import NoReturn

from .standins import OPERATORS, Remote, RemoteCallable, error_like
from .values import Value
from .wire import MOST_MESSAGE_BYTES, Wire

PROGRAM_NAME = "<solution>"
MOST_TEXT_CHARS = 4000
UNFINISHED = "the program ended before the code appended to it\n"

Answer = Callable[..., Value]


class Ended(BaseException):
    """The other process has ended, or does not follow the protocol."""


def call(function: Callable[..., Value], given: tuple[Value, ...], named: tuple[tuple[str, Value], ...]) -> Value:
    """Call a function with arguments from another process."""
    return function(*given, **dict(named))


ANSWERS: dict[str, Answer] = {
    "get": getattr,
    "set": setattr,
    "call": call,
    "operate": lambda name, *given: OPERATORS[name](*given),
}
"""Questions that both ends answer."""


def keep_files(files: list[int]) -> None:
    """Renumber the given open files from 0 and close all others, at the start of an end's process."""
    above = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, len(files)) for descriptor in files]
    for target, descriptor in enumerate(above):
        os.dup2(descriptor, target)
    os.closerange(len(files), 1 << 16)


class Peer:
    """An end with a pipe to read from and one to write to."""

    answers = ANSWERS

    def __init__(self, reader: int, writer: int) -> None:
        self.reader = reader
        self.writer = writer
        self.wire = Wire(self.stand_in, shows_functions=True)
        self._standins: dict[int, Remote] = {}

    # -- bytes

    def send(self, kind: str, *root: Value) -> None:
        """Send a message.

        Raises: ValueError if it is too large; Ended.
        """
        message = self.wire.write(kind, *root)
        rest = memoryview(len(message).to_bytes(4, "big") + message)
        while rest:
            try:
                rest = rest[os.write(self.writer, rest) :]
            except OSError:
                self.fail(UNFINISHED)
        self.wire.sent()

    def receive(self) -> tuple[str, list[Value]]:
        """Return the kind and the content of the next message.

        Raises: Ended.
        """
        size = int.from_bytes(self._read(4), "big")
        if size > MOST_MESSAGE_BYTES:
            self.fail("the program sent a message that is too large")
        try:
            return self.wire.read(self._read(size), self.begin)
        except ValueError as error:
            self.fail(str(error))

    def _read(self, size: int) -> bytes:
        parts = []
        while size:
            try:
                part = os.read(self.reader, min(size, 1 << 20))
            except OSError:
                part = b""
            if not part:
                self.fail(UNFINISHED)
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def fail(self, fault: str) -> NoReturn:
        """Give up the exchange.

        Raises: Ended.
        """
        raise Ended(fault)

    # -- for the two ends to define

    def begin(self, kind: str) -> None:
        """Prepare to read a message of a kind."""

    def stand_in(self, number: int, kind: str, compares: bool) -> Value:
        """Return the stand-in of an object of the other process, one for each number."""
        if number not in self._standins:
            make = Remote if kind in ("object", "module", "coroutine") else RemoteCallable
            self._standins[number] = make(self, number, kind)
        return self._standins[number]

    def check_request(self, action: str, given: list[Value]) -> None:
        """Refuse a question that this end does not answer."""

    def described(self, error: BaseException) -> tuple[Value, ...]:
        """Return an exception's class, arguments and text, the exception, and its trace."""
        raise NotImplementedError

    # -- questions

    def ask(self, action: str, *given: Value) -> Value:
        """Return the other process's answer.

        Raises: the exception that it raised; Ended.
        """
        return self.exchange(False, action, given)[1]

    def exchange(self, captures: bool, action: str, given: tuple[Value, ...]) -> tuple[str, Value]:
        """Send a request; return the captured output of the other process, if any, and its answer."""
        self.send("ask", captures, action, *given)
        while True:
            kind, content = self.receive()
            if kind == "ask":
                self.answer(content)
                continue
            try:
                if kind == "value":
                    output, value = content
                    return plain_text(output), value
                _, error_kind, arguments, text, remote, trace = content
                error = error_like(error_kind, tuple(arguments), plain_text(text), remote, plain_text(trace))
            except (TypeError, ValueError) as wrong:
                self.fail(str(wrong))
            raise error

    def answer(self, content: list[Value]) -> None:
        """Answer a question of the other process, and empty its list."""
        captures, action, *given = content
        content.clear()  # a container that only this list holds would stay shared
        output = StringIO()
        stdout = sys.stdout
        if captures:
            sys.stdout = output
        kind = "value"
        try:
            self.check_request(action, given)
            result: tuple[Value, ...] = (self.answers[action](*given),)
        except Ended:
            raise
        except BaseException as error:  # whatever the program raises is its answer
            kind = "raise"
            result = self.described(error)
        del given
        if captures:
            sys.stdout = stdout
        try:
            self.send(kind, output.getvalue(), *result)
        except Exception as error:  # a value that cannot be sent
            self.send("raise", "", *self.described(error))


def plain_text(value: Value) -> str:
    """Return a value that must be a plain text, not an object that imitates one.

    Raises: TypeError.
    """
    if type(value) is not str:
        raise TypeError(f"a {type(value).__name__} in place of a text")
    return value


def text_of(error: BaseException) -> str:
    """Return the text of an exception; no text if that raises."""
    try:
        return str.__str__(str(error))[:MOST_TEXT_CHARS]
    except BaseException:  # its text may raise anything
        return ""


def trace_of(error: BaseException, file: str, chain: bool = True) -> str:
    """Return the end of an exception's trace, from the first line of a file on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename != file:
        trace = trace.tb_next
    shown = type(error).__name__
    with suppress(BaseException):  # its text may raise
        shown = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__, chain=chain))
    return shown[-MOST_TEXT_CHARS:]
