"""The way from the trainer, a Ray actor, to the terminal of the launching process.

Ray prints what an actor writes behind a prefix and some time later. What is meant for the person who watches goes
through the key-value store of the cluster instead, in order and complete, on whichever node the trainer runs.
"""

import json
import logging
import secrets
import threading
from typing import Any

import ray
from ray.experimental.internal_kv import _internal_kv_del, _internal_kv_get, _internal_kv_put

from verl.trainer.run.display import LocalDisplay, set_display

_NAMESPACE = b"verl_terminal"
_POLL_S = 0.2


class RemoteDisplay:
    """Stands in for the terminal in the trainer's process."""

    def __init__(self, name: str) -> None:
        """Send to the ``Terminal`` of that name."""
        self._name, self._count = name, 0
        self._lock = threading.Lock()  # warnings come from any thread, and the terminal waits for every number

    def _send(self, method: str, **content: Any) -> None:
        with self._lock:
            key = f"{self._name}:{self._count}".encode()
            _internal_kv_put(key, json.dumps([method, content]).encode(), namespace=_NAMESPACE)
            self._count += 1

    def write(self, text: str) -> None:
        """Show a line."""
        self._send("write", text=text)

    def progress(self, step: int, total: int, start: int, text: str, seconds: float) -> None:
        """Show how far the run is."""
        self._send("progress", step=step, total=total, start=start, text=text, seconds=seconds)

    def close(self) -> None:
        """End the display of progress."""
        self._send("close")


class _Warnings(logging.Handler):
    """Show the library's warnings. An error is not shown here: it ends the run, whose last words it is."""

    def __init__(self, display: RemoteDisplay) -> None:
        super().__init__(logging.WARNING)
        self._display = display

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno < logging.ERROR:
            self._display.write(f"{record.levelname}: {record.getMessage()}")


def attach_display(actor: Any, name: str) -> None:
    """Send what this process shows to the ``Terminal`` of that name."""
    display = RemoteDisplay(name)
    set_display(display)
    logging.getLogger("verl").addHandler(_Warnings(display))


class Terminal:
    """Shows, in the launching process, what the trainer sends."""

    def __init__(self, display: LocalDisplay) -> None:
        self.name = secrets.token_hex(8)
        self._display, self._count = display, 0

    def watch(self, result: Any) -> Any:
        """Show what comes until the result of the trainer's run is there, and return it."""
        while True:
            done, _ = ray.wait([result], timeout=_POLL_S)
            self.show()
            if done:
                return ray.get(result)

    def show(self) -> None:
        """Show what has come."""
        while True:
            key = f"{self.name}:{self._count}".encode()
            message = _internal_kv_get(key, namespace=_NAMESPACE)
            if message is None:
                return
            _internal_kv_del(key, namespace=_NAMESPACE)
            self._count += 1
            method, content = json.loads(message)
            getattr(self._display, method)(**content)
