"""One owner per folder: a run refuses to start where another run keeps its checkpoints, records or dumps.

The owner holds a lock of the operating system on a small file in the folder. The system takes the lock back when the
process ends, however it ends; a stopped process keeps its lock. The file names the owner, for processes that cannot see
the lock: on other machines, and on file systems without locks.
"""

import atexit
import errno
import fcntl
import json
import logging
import os
import shlex
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Self

from verl.base_config import ConfigError, Violation, matches, type_hints
from verl.utils.fs import existing_part

logger = logging.getLogger(__name__)

LOCK_NAME = ".owner"
"""Name of the file in an owned folder."""
_MOST_BYTES = 65_536
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
"""Errors of ``flock`` on a file system without locks."""
_ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Signals that end a process without running any of its code, unless they have a handler."""
_owners: list["Ownership"] = []
"""Owners whose ``with`` block has not ended."""


def _line_of(path: str) -> str:
    """Return the text of a small file of the system; empty if there is none."""
    with suppress(OSError):
        return Path(path).read_text(encoding="utf-8").strip()
    return ""


@dataclass(frozen=True)
class Process:
    """The launching process of a run, by names that no later process has.

    Attributes:
        host, machine: name of the machine, and its id from the installation.
        boot: id of the running system; all containers of a machine share it.
        namespace: id of the container's table of processes, in which ``pid`` counts.
        start: start time in ticks since the boot, which no change of the clock moves.
    """

    host: str
    machine: str
    boot: str
    namespace: str
    pid: int
    start: int

    @classmethod
    def this(cls) -> Self:
        """Return the calling process."""
        namespace = os.readlink("/proc/self/ns/pid") if os.path.lexists("/proc/self/ns/pid") else ""
        boot = _line_of("/proc/sys/kernel/random/boot_id")
        pid = os.getpid()
        known = _state_and_start(pid)
        return cls(socket.gethostname(), _line_of("/etc/machine-id"), boot, namespace, pid, known[1] if known else 0)

    def is_seen_by(self, other: "Process") -> bool:
        """Whether ``other`` can look this process up by its id."""
        return (self.host, self.boot, self.namespace) == (other.host, other.boot, other.namespace)

    def shares_machine_with(self, other: "Process") -> bool:
        """Whether both run on one machine, perhaps in two containers or before and after a restart."""
        if self.boot and self.boot == other.boot:
            return True
        return (self.host, self.machine) == (other.host, other.machine)

    def is_alive(self) -> bool:
        """Whether a process that this one can look up runs or is stopped."""
        known = _state_and_start(self.pid)
        return known is not None and known[0] not in "ZX" and known[1] == self.start


def _state_and_start(pid: int) -> tuple[str, int] | None:
    """Return the state of a process, Z or X if it has ended, and its start time; None if there is none."""
    words = _line_of(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return (words[0], int(words[19])) if words else None


def read_owner(file: Path) -> Process | None:
    """Return the process that a file names; None if it has just been made or its owner died while writing.

    Raises: ValueError if the file holds anything else.
    """
    try:
        if not file.is_file() or file.stat().st_size > _MOST_BYTES:
            raise ValueError
        text = file.read_text(encoding="utf-8")
        if not text:
            return None
        fields = json.loads(text)
        hints = type_hints(Process)
        if fields.keys() != hints.keys() or not all(matches(fields[name], hint) for name, hint in hints.items()):
            raise ValueError
    except FileNotFoundError:
        return None
    except (ValueError, AttributeError, RecursionError):
        raise ValueError(f"{file} names no owner: if no run uses it, remove it: rm {shlex.quote(str(file))}") from None
    return Process(**fields)


def has_owner(folder: Path) -> bool:
    """Whether a run uses a folder; true as well if that cannot be told from this machine."""
    file = folder / LOCK_NAME
    if not file.exists():
        return False
    try:
        owner = read_owner(file)
    except ValueError:  # whoever wrote it
        return True
    if owner is None:  # the file is being written
        return True
    return not owner.is_seen_by(Process.this()) or owner.is_alive()


def free_folders() -> None:
    """Free the folders of this process, which ends without leaving its ``with`` blocks."""
    for owner in [*_owners]:
        owner.free()


def _free_and_end(number: int, frame: FrameType | None) -> None:
    free_folders()
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)


class Ownership:
    """The folders of one run, from ``take`` to the end of the ``with`` block or of the process.

    A signal that would end the process at once frees them first: another machine cannot see that their owner has gone.

    Args: with ``takes=False`` the run only checks its inputs, and takes nothing.
    """

    def __init__(self, takes: bool = True) -> None:
        self._takes = takes
        self._here = Process.this()
        self._files: dict[Path, int] = {}
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def take_folders(self, folders: Mapping[str, str | None], is_elsewhere: bool = False) -> None:
        """Take the folders that dotted keys name.

        With ``is_elsewhere`` the trainer may run on another machine: a folder that this one cannot make stays
        unguarded, with a warning.

        Raises: as ``take``.
        """
        for key, folder in folders.items():
            if not folder or "://" in folder:
                continue
            file = Path(folder).expanduser().absolute() / LOCK_NAME
            if is_elsewhere and not os.access(existing_part(str(file.parent)), os.W_OK):
                logger.warning("%s=%s: not on this machine, so nothing keeps a second run out", key, folder)
            else:
                self.take(key, folder, file)

    def take(self, key: str, value: str, file: Path) -> None:
        """Take ownership of the output that the user named by ``key=value``; ``file`` is its lock file.

        Raises: ConfigError if another run owns it, or may own it, or if the file cannot be written.
        """
        if not self._takes:
            return
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            file = file.parent.resolve() / file.name
            if file not in self._files:
                self._claim(file)
        except OSError as error:
            reason = f"cannot be written: {error.strerror}: write another path"
            raise ConfigError([Violation(key, value, reason)]) from None
        except ValueError as problem:
            raise ConfigError([Violation(key, value, str(problem))]) from None

    def _claim(self, file: Path) -> None:
        """Lock the file and write this process into it.

        Raises: ValueError with the reason if another run is alive or may be.
        """
        handle = _lock(file)
        with ExitStack() as locked:
            if handle is not None:
                locked.callback(os.close, handle)
            problem = self._problem(read_owner(file), file, has_lock=handle is not None)
            if problem is not None:
                raise ValueError(problem)
            locked.pop_all()
        assert handle is not None
        self._files[file] = handle
        content = json.dumps(asdict(self._here)).encode()
        os.pwrite(handle, content, 0)
        os.ftruncate(handle, len(content))

    def _problem(self, owner: Process | None, file: Path, has_lock: bool) -> str | None:
        """Return why the ``owner`` that ``file`` names keeps it; None if it is free."""
        if owner is None:
            return None if has_lock else "another run is starting there: write another path"
        if not owner.shares_machine_with(self._here):
            return (
                f"belongs to process {owner.pid} on {owner.host}, which cannot be seen from {self._here.host}. "
                f"If that run has ended, release it: rm {shlex.quote(str(file))}"
            )
        is_seen = owner.is_seen_by(self._here)
        if has_lock and (owner == self._here or not is_seen or not owner.is_alive()):
            return None
        where = "" if is_seen else f" on {owner.host}"
        return f"belongs to a run that is alive, process {owner.pid}{where}: write another path, or end that run"

    def _leave_to_parent(self) -> None:
        """Close the lock files in a forked child: a child that outlives this process must not keep the locks."""
        self._close()
        for number in _ENDS:
            if signal.getsignal(number) is _free_and_end:
                signal.signal(number, signal.SIG_DFL)

    def _close(self) -> None:
        for handle in self._files.values():
            os.close(handle)
        self._files = {}

    def __enter__(self) -> Self:
        _owners.append(self)
        atexit.register(self.free)  # should another Ctrl-C end the ``with`` block too early
        if threading.current_thread() is threading.main_thread():
            for number in _ENDS:
                if signal.getsignal(number) is signal.SIG_DFL:
                    signal.signal(number, _free_and_end)
        return self

    def __exit__(self, *exception: object) -> None:
        """Free the folders."""
        self.free()
        atexit.unregister(self.free)
        _owners.remove(self)

    def free(self) -> None:
        """Remove the files that name this owner, and give their locks back; no Ctrl-C interrupts this."""
        is_main = threading.current_thread() is threading.main_thread()
        numbers = (signal.SIGINT, *_ENDS) if is_main else ()
        handlers = {number: signal.signal(number, signal.SIG_IGN) for number in numbers}
        for file, handle in self._files.items():
            with suppress(OSError):  # for instance if the user has deleted the folder
                if _is_at(handle, file) and os.getpid() == self._here.pid:  # a signal may come first in a forked child
                    file.unlink()
        self._close()
        for number, handler in handlers.items():
            if handler is not None:  # None: set by other code than Python's
                signal.signal(number, handler)


def _lock(file: Path) -> int | None:
    """Return the handle of the locked file; None if another process has the lock."""
    while True:
        handle = os.open(file, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        except OSError as error:
            if error.errno not in _WITHOUT_LOCKS:
                os.close(handle)
                raise
        # Another process may have replaced the file between the two calls; a lock on a removed file keeps nobody out.
        if _is_at(handle, file):
            return handle
        os.close(handle)  # the owner has just ended and removed the file


def _is_at(handle: int, file: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(handle), file.stat())
    return False
