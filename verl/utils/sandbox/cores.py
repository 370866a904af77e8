"""The cores that programs under test share, and the permits for second tries."""

import fcntl
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from verl.utils.sandbox.permits import FilePermits

PLACE = "/tmp" if os.access("/tmp", os.W_OK) else ""
"""Where the locks lie: in one place for all processes, whatever their folder for temporary files."""
SECOND_TRIES = 16
SECOND_TRIES_WINDOW_S = 600.0
"""At most that many second tries start in that time, over all processes of one user on a machine."""


def usable_cores() -> list[int]:
    """Return the numbers of the cores that this process may use at once: its affinity, cut to the quota of its groups.

    It is at least one core.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    quota = min(_quotas(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")), default=len(cores))
    return cores[: max(1, int(quota))]


def _quotas(groups: Path, mount: Path) -> Iterator[float]:
    """Yield the cores that each control group of this process, and each above it, may use. Both versions are read."""
    try:
        lines = groups.read_text(encoding="utf-8").splitlines()
    except OSError:
        return
    for line in lines:
        number, controllers, path = line.split(":", 2)
        if number == "0":
            root = mount
        elif "cpu" in controllers.split(","):
            root = mount / "cpu"
        else:
            continue
        here = root / path.lstrip("/")
        for folder in (here, *here.parents):
            yield from _quota(folder)
            if folder == root:
                break


def _quota(folder: Path) -> Iterator[float]:
    """Yield the cores that one control group may use, if it has a limit."""
    for names in (["cpu.max"], ["cpu.cfs_quota_us", "cpu.cfs_period_us"]):
        try:
            quota, period = " ".join((folder / name).read_text(encoding="utf-8") for name in names).split()
        except (OSError, ValueError):
            continue
        if quota not in ("max", "-1"):
            yield int(quota) / int(period)


def cores() -> FilePermits:
    """Return permits for programs under test, one for each core that this process may use."""
    numbers = usable_cores()
    return FilePermits("programs under test", len(numbers), numbers, PLACE)


def waiting_line() -> FilePermits:
    """Return the permit to look for a free core; one process at a time has it, and the others wait."""
    return FilePermits("programs under test wait", 1, place=PLACE)


def second_core() -> FilePermits:
    """Return the one permit for second tries."""
    return FilePermits("programs under test tried again", 1, place=PLACE)


def may_try_again() -> bool:
    """Use up one of the remaining second tries; return whether there was one."""
    folder = second_core().folder
    os.makedirs(folder, mode=0o700, exist_ok=True)
    with open(os.path.join(folder, "tries"), "a+", encoding="ascii") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        now = time.monotonic()  # counts from the start of the machine, for all its processes
        recent = [start for start in _times(file.read()) if 0 <= now - start < SECOND_TRIES_WINDOW_S]
        if len(recent) >= SECOND_TRIES:
            return False
        file.truncate(0)
        file.write(json.dumps([*recent, now]))
    return True


def _times(text: str) -> list[float]:
    """Return the times of a file; none if its writer was killed."""
    try:
        return [float(each) for each in json.loads(text)]
    except (ValueError, TypeError):
        return []
