"""What SGLang's engine leaves behind on a machine, and its removal however the engine's owner ends."""

import contextlib
import fcntl
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from zmq import Socket

_PREFIX = "verl-sglang-"
_SHARED_MEMORY = Path("/dev/shm")
_START_LIMIT_S = 60.0
_GUARD = """
trap "" HUP INT TERM
exec 3<&0
(
    read -r _ <&3
    read -r id <"$1/instance" && rm -f /dev/shm/sglang_loads_"$id"_*
    rm -rf "$1"
) &
"""
"""Removes a folder, and the counters of its engine, at the end of its input. As a grandchild of the owner, since Ray
kills the children of an actor."""


class SocketFolder:
    """The folder of the sockets between the processes of an engine.

    ``opened`` are the sockets of this process. ``close`` closes them; no message is waited for, as whoever would take
    it is gone.

    The folder is removed by ``close``, and by a process that waits for the end of the owner, however that ends. The
    folders of owners that were killed with all their processes are removed when the next one is made: an owner holds a
    lock, which the kernel releases with the process.
    """

    def __init__(self) -> None:
        _remove_stale()
        self.path = Path(tempfile.mkdtemp(prefix=_PREFIX))
        self.instance: str | None = None
        self.opened: list[Socket[Any]] = []
        self._lock = (self.path / "lock").open("w", encoding="utf-8")
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        nothing = subprocess.DEVNULL
        command = ["sh", "-c", _GUARD, "sh", str(self.path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=nothing, stderr=nothing) as shell:
            self._life, shell.stdin = shell.stdin, None  # else it is closed here

    def note(self, instance: str) -> None:
        """Note SGLang's id of the engine, whose counters in shared memory are removed with the folder."""
        self.instance = instance
        (self.path / "instance").write_text(f"{instance}\n", encoding="utf-8")

    def close(self) -> None:
        """Close the sockets, and remove the folder and what is left of the engine's counters."""
        while self.opened:
            self.opened.pop().close(linger=0)
        unlink_shared_memory((), self.instance)
        shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        if self._life is not None:
            self._life.close()


def _remove_stale() -> None:
    now = time.time()
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # of another user, or gone already
            if now - folder.stat().st_mtime < _START_LIMIT_S:
                continue
            with (folder / "lock").open("a", encoding="utf-8") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)


def unlink_shared_memory(pids: Iterable[int], instance: str | None) -> None:
    """Unlink the shared memory of schedulers, which lives while they map it and is freed with them.

    With a name, a killed engine would leave 25 MB for each tensor-parallel group.

    Args: ``instance`` is SGLang's id of the engine, None if a process may still open its counters.
    """
    names = [f"sgl_shm_*_{pid}_*" for pid in pids]
    if instance:
        names.append(f"sglang_loads_{instance}_*")
    for name in names:
        for path in _SHARED_MEMORY.glob(name):
            path.unlink(missing_ok=True)
