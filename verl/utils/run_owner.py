"""Read which process owns the folder of a run, from the file that ``verl.trainer.run.owner`` writes."""

import json
import os
import shlex
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from verl.base_config import matches, type_hints

LOCK_NAME = ".owner"
"""Name of the file in an owned folder."""
_MOST_BYTES = 65_536


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
    if owner is None:  # it is being written
        return True
    return not owner.is_seen_by(Process.this()) or owner.is_alive()
