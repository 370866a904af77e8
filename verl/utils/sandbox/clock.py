"""Measure the time of programs such that a busy machine does not count against them.

A program uses up time while it computes, and while it sleeps or blocks. Time in which it waits for a core does not
count. This module uses the standard library only, because the supervisor loads this file without the package.
"""

import os
import time
from collections.abc import Callable

OVERHEAD_CPU_S = 0.2
"""CPU time that the interpreter itself may take to start and to end, beyond the limit of the program."""
IDLE_FACTOR = 2
LEAST_IDLE_LIMIT_S = 1.0
STARVED_FACTOR = 60
LEAST_STARVED_LIMIT_S = 60.0
LONGEST_STEP_S = 1.0
"""Longest time between two looks that counts in full. In a longer gap the looking process itself did not run."""
MOST_TASKS = 256
"""Number of processes and threads that one look reads: a program cannot make it long."""
CPU = "cpu"
IDLE = "idle"
STARVED = "starved"
_CPU_CLOCK = 2  # of all threads of a process, as the kernel numbers clocks
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")

Processes = Callable[[], list[int]]


def descendants(root: int) -> list[int]:
    """Return the processes below a process, at most ``MOST_TASKS``."""
    found: list[int] = []
    waiting = [root]
    while waiting and len(found) < MOST_TASKS:
        pid = waiting.pop()
        for task in _tasks(pid):
            children = [int(child) for child in _read(f"{task}/children").split()]
            found += children
            waiting += children
    return found[:MOST_TASKS]


class Clock:
    """Counts the time of groups of processes that work for one another, such as a program and its checker.

    ``look`` is to be called at least every ``LONGEST_STEP_S``. Where the kernel does not say how long a process waited
    for a core (``/proc/PID/schedstat``), such time counts as idle.

    Args:
        limit_s: CPU time of each group. All together may be idle for twice that, and wait for a core for 60 times that.
        groups: each returns the processes of a group.
    """

    def __init__(self, limit_s: float, *groups: Processes) -> None:
        self.cpu_limit_s = limit_s + OVERHEAD_CPU_S
        self.idle_limit_s = max(IDLE_FACTOR * limit_s, LEAST_IDLE_LIMIT_S)
        self.starved_limit_s = max(STARVED_FACTOR * limit_s, LEAST_STARVED_LIMIT_S)
        self._groups = [_Group(processes) for processes in groups]
        self._last = time.monotonic()
        self._watched_s = 0.0
        self._awake_s = 0.0

    @property
    def counted_s(self) -> float:
        """Time that the groups have used up, as of the last look: CPU time, and time in which all were idle."""
        return self._watched_s - self._awake_s + sum(group.cpu_s for group in self._groups)

    @property
    def cpu_s(self) -> float:
        """CPU time of the group that has used the most, as of the last look."""
        return max(group.cpu_s for group in self._groups)

    def look(self) -> str | None:
        """Return ``CPU``, ``IDLE`` or ``STARVED`` if that time is used up."""
        now = time.monotonic()
        self._awake_s += sum(group.look(self._last, now) for group in self._groups)
        self._watched_s += min(now - self._last, LONGEST_STEP_S)
        self._awake_s = min(self._awake_s, self._watched_s)
        self._last = now
        if self.cpu_s > self.cpu_limit_s:
            return CPU
        idle_s = self._watched_s - self._awake_s
        # The kernel counts a wait for a core only when it has ended: subtract a wait that is still open.
        if idle_s > self.idle_limit_s:
            idle_s -= max(group.open_wait_s(now) for group in self._groups)
            if idle_s > self.idle_limit_s:
                return IDLE
        starved_s = self._watched_s - idle_s - sum(group.cpu_s for group in self._groups)  # below 0 on many cores
        return STARVED if starved_s > self.starved_limit_s else None


class _Group:
    """Processes of which usually only one thread computes at a time."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.cpu_s = 0.0
        self._own_cpu_s: dict[int, float] = {}
        self._tasks: dict[str, tuple[int, float]] = {}
        """Time on a core or in wait for one, in ns, and a time from which on it has not changed."""

    def look(self, last: float, now: float) -> float:
        """Add the time used since the last look; return how long a thread ran or waited for a core.

        The result is the maximum over threads: several threads that wait for the same core are together awake only as
        long as one of them.
        """
        pids = self.processes()
        before_s = self.cpu_s
        self._own_cpu_s |= {pid: own_s for pid in pids if (own_s := _own_cpu_s(pid))}  # keeps children that have ended
        waited_s = sum(_waited_cpu_s(pid) + self._own_cpu_s.get(pid, 0.0) for pid in pids)
        self.cpu_s = max(before_s, sum(self._own_cpu_s.values()), waited_s)
        used_s = self.cpu_s - before_s
        tasks: dict[str, tuple[int, float]] = {}
        awake_ns = 0
        step_ns = int((now - last) * 1e9)
        for task in [task for pid in pids for task in _tasks(pid)][:MOST_TASKS]:
            awake = sum(map(int, _read(f"{task}/schedstat").split()[:2]))
            before, since = self._tasks.get(task, (awake - step_ns, last))
            tasks[task] = awake, since if awake == before else last
            awake_ns = max(awake_ns, awake - max(0, before))
        self._tasks = tasks
        return max(awake_ns / 1e9, min(used_s, now - last))

    def open_wait_s(self, now: float) -> float:
        """Return how long a thread that waits for a core may have been waiting."""
        return max((now - since for task, (_, since) in self._tasks.items() if _is_runnable(task)), default=0.0)


def _tasks(pid: int) -> list[str]:
    """Return the folders of a process's threads."""
    try:
        return [f"/proc/{pid}/task/{name}" for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:  # the process has ended
        return []


def _read(path: str) -> str:
    """Return a file of the kernel's; nothing if it is not there, as after the end of a process."""
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""


def _fields(folder: str) -> list[str]:
    """Return the fields of ``/proc/.../stat`` from the state on; the name before them may hold any character."""
    return _read(f"{folder}/stat").rpartition(")")[2].split()


def _is_runnable(task: str) -> bool:
    return _fields(task)[:1] == ["R"]


def _own_cpu_s(pid: int) -> float:
    """Return the CPU time of all threads of a process; 0 if it has ended."""
    try:
        return time.clock_gettime((~pid << 3) | _CPU_CLOCK)
    except OSError:
        return 0.0


def _waited_cpu_s(pid: int) -> float:
    """Return the CPU time of the children that a process has waited for."""
    return sum(map(int, _fields(f"/proc/{pid}")[13:15])) / _TICKS_PER_S
