"""Limit concurrency over all processes of a machine by file locks, which a dying process releases."""

import fcntl
import hashlib
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from types import TracebackType
from typing import IO

WAIT_TIMEOUT_S = 600.0
_LOOK_EVERY_S = 0.02
_HELD = threading.local()  # folder -> locks that the thread holds


class FilePermits:
    """Context manager that at most ``count`` holders enter at once, over threads and processes.

    Args:
        name: identifies the permits; processes of one user on a machine share permits of equal name.
        numbers: numbers of the permits, by default from 0; other processes may share only some.
        place: folder of the locks, by default that for temporary files.
    """

    def __init__(self, name: str, count: int, numbers: Sequence[int] | None = None, place: str = "") -> None:
        digest = hashlib.sha256(name.encode()).hexdigest()[:16]
        self.folder = os.path.join(place or tempfile.gettempdir(), f"verl-permits-{os.getuid()}-{digest}")
        self.count = count
        self.numbers = range(count) if numbers is None else numbers

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

    def try_take(self) -> IO[bytes] | None:
        """Return a permit that is free, for ``give_back``; None if there is none now.

        The permit is an open file: if an exception drops it, Python closes the file, which frees the permit.
        """
        os.makedirs(self.folder, mode=0o700, exist_ok=True)
        for number in random.sample(self.numbers, self.count):
            permit = open(os.path.join(self.folder, str(number)), "ab")
            try:
                fcntl.flock(permit, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                permit.close()
            else:
                return permit
        return None

    def give_back(self, permit: IO[bytes]) -> None:
        """Free a permit that ``try_take`` returned."""
        fcntl.flock(permit, fcntl.LOCK_UN)  # closing does not free it while a forked process has the file open
        permit.close()

    def _handles(self) -> list[IO[bytes]]:
        """Return the locks that this thread holds."""
        return _HELD.__dict__.setdefault(self.folder, [])
