"""Temporary folders of processes that may be killed: the next start on the machine removes leftovers.

Such a folder holds a file that its process keeps locked. The system takes the lock back when the process ends, however
it ends, and no other container can take it before.
"""

import fcntl
import os
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

RUN = "run"
FORK = "fork"
SANDBOX = "sandbox"
SGLANG = "sglang"
VLLM = "vllm"
_KINDS = (RUN, FORK, SANDBOX, SGLANG, VLLM)
_LOCK_NAME = "lock"
_SHARED_MEMORY_NAME = "shared_memory"
_SHARED_MEMORY = Path("/dev/shm")
_GUARD = f"""
trap "" HUP INT TERM
exec 3<&0
(
    read -r _ <&3
    read -r start <"$1/{_SHARED_MEMORY_NAME}" && [ -n "$start" ] && rm -f {_SHARED_MEMORY}/"$start"*
    rm -rf "$1"
) &
"""
"""Removes a folder, and its shared memory, at the end of its input. As a grandchild of the owner, since Ray kills the
children of an actor."""


class TemporaryFolder:
    """A temporary folder, which exists until ``remove`` or the end of this process.

    Args:
        kind: a word in the folder's name that says what the folder is for.
        is_guarded: whether another process waits for the end of this one, and removes the folder then.
    """

    def __init__(self, kind: str, is_guarded: bool = False) -> None:
        self.path = Path(tempfile.mkdtemp(prefix=f"verl-{kind}-"))
        new = self.path / f"{_LOCK_NAME}.new"
        lock = os.open(new, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with suppress(OSError):  # the file system has no locks, so nobody else can take one either
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            new.rename(self.path / _LOCK_NAME)  # the file appears with the lock held
        self._handles = [lock, _guard(self.path)] if is_guarded else [lock]

    def note_shared_memory(self, start: str) -> None:
        """Note the prefix of the names of shared memory that is to be removed with the folder."""
        with suppress(OSError):  # on a full disk there is no note
            (self.path / _SHARED_MEMORY_NAME).write_text(f"{start}\n", encoding="utf-8")

    def remove(self) -> None:
        """Remove the folder and its shared memory."""
        _remove_shared_memory(self.path)
        shutil.rmtree(self.path, ignore_errors=True)
        while self._handles:
            os.close(self._handles.pop())


def _guard(folder: Path) -> int:
    """Start a process that removes a folder once the returned handle is closed."""
    end, life = os.pipe()
    nothing = subprocess.DEVNULL
    subprocess.run(["sh", "-c", _GUARD, "sh", str(folder)], stdin=end, stdout=nothing, stderr=nothing, check=False)
    os.close(end)
    return life


def remove_folders_of_the_dead() -> None:
    """Remove the folders that killed processes of this user have left, with their shared memory."""
    place = Path(tempfile.gettempdir())
    for mark in (mark for kind in _KINDS for mark in place.glob(f"verl-{kind}-*/{_LOCK_NAME}")):
        with suppress(OSError):  # for instance the lock of a living process
            if mark.parent.is_symlink() or mark.parent.stat().st_uid != os.getuid():
                continue
            # A lock that can be taken belongs to nobody alive. Its owner has made the file with the lock on it, so
            # there is no moment at which a living owner has none.
            handle = os.open(mark, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _remove_shared_memory(mark.parent)
                # An untrusted program may have made a tree that is too deep for Python.
                subprocess.run(["rm", "-rf", str(mark.parent)], stderr=subprocess.DEVNULL, check=False)
            finally:
                os.close(handle)


def _remove_shared_memory(folder: Path) -> None:
    """Remove the shared memory that belongs to a folder."""
    with suppress(OSError):
        if start := (folder / _SHARED_MEMORY_NAME).read_text(encoding="utf-8").strip():
            for memory in _SHARED_MEMORY.glob(f"{start}*"):
                memory.unlink(missing_ok=True)
