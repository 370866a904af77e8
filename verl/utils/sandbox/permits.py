"""A limit on what all processes of a machine do at once, held in files, so that a process that dies gives back."""

import fcntl
import hashlib
import os
import random
import tempfile
import threading
import time
from typing import Any

WAIT_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.02


class FilePermits:
    """Lets ``count`` holders in at once, over threads and processes; used as a context manager.

    Args: ``name`` is what the permits are for: the same name shares them, for one user on one machine.
    """

    def __init__(self, name: str, count: int) -> None:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.folder = os.path.join(tempfile.gettempdir(), f"verl-permits-{os.getuid()}-{digest}")
        self.count = count
        self._held = threading.local()

    def __getstate__(self) -> dict[str, Any]:
        return {"folder": self.folder, "count": self.count}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _held=threading.local())

    def __enter__(self) -> "FilePermits":
        """Wait for a permit.

        Raises: TimeoutError when there is none for ten minutes.
        """
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        end = time.monotonic() + WAIT_TIMEOUT_S
        while True:
            for number in random.sample(range(self.count), self.count):
                handle = os.open(os.path.join(self.folder, str(number)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os.close(handle)
                else:
                    self._handles().append(handle)
                    return self
            if time.monotonic() > end:
                raise TimeoutError(f"none of {self.count} permits was given back within {WAIT_TIMEOUT_S:g} s")
            time.sleep(_LOOK_EVERY_S)

    def __exit__(self, *exception: Any) -> None:
        os.close(self._handles().pop())

    def _handles(self) -> list[int]:
        if not hasattr(self._held, "handles"):
            self._held.handles = []
        return self._held.handles
