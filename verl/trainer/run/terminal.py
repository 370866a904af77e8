"""Carry the display of the trainer, a Ray actor, to the terminal of the launching process.

Ray prints the output of an actor late and with a prefix. Lines for the user go through the key-value store of the
cluster instead, which keeps them complete and in order on every node.
"""

import json
import logging
import secrets
import threading
from typing import TypeVar

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from verl.trainer.run.display import LocalDisplay, set_display

T = TypeVar("T")

_NAMESPACE = b"verl_terminal"
_POLL_S = 0.2


class RemoteDisplay:
    """A display in the trainer's process that sends everything to a ``Terminal``."""

    def __init__(self, name: str) -> None:
        """Send to the ``Terminal`` of that name."""
        self._name = name
        self._count = 0
        self._lock = threading.Lock()  # any thread may warn, and the terminal waits for every number

    def _send(self, method: str, **content: str | float) -> None:
        with self._lock:
            key = f"{self._name}:{self._count}".encode()
            _internal_kv_put(key, json.dumps([method, content]).encode(), namespace=_NAMESPACE)
            self._count += 1

    def write(self, text: str) -> None:
        """Show a line."""
        self._send("write", text=text)

    def progress(self, step: int, total: int, start: int, text: str, seconds: float) -> None:
        """Show the progress of the run."""
        self._send("progress", step=step, total=total, start=start, text=text, seconds=seconds)

    def close(self) -> None:
        """End the display of progress."""
        self._send("close")


class _Warnings(logging.Handler):
    """Show the library's warnings. Errors end the run, whose last message shows them."""

    def __init__(self, display: RemoteDisplay) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            self._display.write(f"{record.levelname}: {record.getMessage()}")


def attach_display(actor: T, name: str) -> None:
    """Send the display of this process to the ``Terminal`` of that name (Ray passes ``actor``, unused)."""
    display = RemoteDisplay(name)
    set_display(display)
    logging.getLogger("verl").addHandler(_Warnings(display))


class Terminal:
    """Shows the trainer's display in the launching process."""

    def __init__(self, display: LocalDisplay) -> None:
        self.name = secrets.token_hex(8)
        self._display = display
        self._count = 0

    def watch(self, result: "ray.ObjectRef[T]") -> T:
        """Show the trainer's display until its result arrives, and return the result."""
        while True:
            done, _ = ray.wait([result], timeout=_POLL_S)
            self.show()
            if done:
                return ray.get(result)

    def show(self) -> None:
        """Show the messages that have arrived."""
        while True:
            key = f"{self.name}:{self._count}".encode()
            message = _internal_kv_get(key, namespace=_NAMESPACE)
            if message is None:
                return
            _internal_kv_del(key, namespace=_NAMESPACE)
            self._count += 1
            method, content = json.loads(message)
            getattr(self._display, method)(**content)
