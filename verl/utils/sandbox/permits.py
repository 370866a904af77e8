"""Limit concurrency over all processes of a machine by file locks, which a dying process releases."""

import fcntl
import hashlib
import os
import random
import tempfile
import threading
import time
from types import TracebackType

WAIT_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.02
_HELD = threading.local()  # folder -> locks that the thread holds


class FilePermits:
    """Context manager that at most ``count`` holders enter at once, over threads and processes.

    Args: ``name`` identifies the permits; one user's processes on a machine share those of equal name.
    """

    def __init__(self, name: str, count: int) -> None:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.folder = os.path.join(tempfile.gettempdir(), f"verl-permits-{os.getuid()}-{digest}")
        self.count = count

    def __enter__(self) -> "FilePermits":
        """Wait for a permit.

        Raises: TimeoutError if none is free for ten minutes.
        """
        end = time.monotonic() + WAIT_TIMEOUT_S
        while (permit := self.try_take()) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"none of the {self.count} permits became free within {WAIT_TIMEOUT_S:g} s")
            time.sleep(_LOOK_EVERY_S)
        self._handles().append(permit)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.give_back(self._handles().pop())

    def try_take(self) -> int | None:
        """Return a permit that is free, for ``give_back``; None if there is none now."""
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        for number in random.sample(range(self.count), self.count):
            handle = os.open(os.path.join(self.folder, str(number)), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(handle)
            else:
                return handle
        return None

    def give_back(self, permit: int) -> None:
        """Free a permit that ``try_take`` returned."""
        os.close(permit)

    def _handles(self) -> list[int]:
        """Return the locks that this thread holds."""
        return _HELD.__dict__.setdefault(self.folder, [])
