"""Processes of a run: whether they live, how they ended, and how to end them."""

import ctypes
import fcntl
import gc
import os
import select
import signal
import struct
import time
from collections.abc import Iterable
from contextlib import suppress

import psutil

_PR_SET_PDEATHSIG = 1
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO = struct.Struct("QQ11Ii")  # struct pidfd_info of Linux 6.15: mask, cgroup, eleven ids, wait status
_PIDFD_INFO_EXIT = 1 << 3
_REAP_GRACE_S = 1.0
_ALLOCATIONS_PER_COLLECTION = 50_000  # Python's own 700 suit a program that holds far fewer objects


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even if this process is stopped; Linux only."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def collect_garbage_rarely() -> None:
    """Run Python's cyclic garbage collector seldom enough that imports do not wait for it.

    The imports of a worker (torch, transformers, vLLM) create 750,000 objects. With the default threshold the collector
    visits them again and again, which takes a fifth of the CPU time of the imports and frees almost nothing.
    """
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)


def end_all(processes: Iterable[psutil.Process], only_stopped: bool = False) -> None:
    """Kill processes that still exist; with ``only_stopped``, those that SIGSTOP keeps from ending by themselves."""
    for process in processes:
        try:
            if not only_stopped or process.status() == psutil.STATUS_STOPPED:
                process.kill()
        except psutil.NoSuchProcess:
            continue


class WatchedProcess:
    """A process on this machine that need not be a child of this one, and may have died already."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._pidfd: int | None = None
        with suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds the process."""
        try:
            return bool(psutil.Process(self.pid).status() == psutil.STATUS_STOPPED)
        except psutil.NoSuchProcess:
            return False

    def ending(self) -> str | None:
        """Return how the process ended, such as ``was killed by SIGSEGV``; None while it lives."""
        code = None
        if self._pidfd is not None:
            poll = select.poll()
            poll.register(self._pidfd, select.POLLIN)
            if not poll.poll(0):
                return None
            code = self._exit_code(self._pidfd)
        if code is None:
            return "has died: SIGKILL, os._exit, or a crash (the system does not tell which)"
        if code >= 0:
            return f"has ended with exit code {code}"
        hint = ", as the kernel does when memory runs out" if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{hint}"

    def _exit_code(self, pidfd: int) -> int | None:
        """Return the exit code of the ended process, negative for a signal; None if the kernel keeps none."""
        with suppress(ChildProcessError):  # not a child, or reaped already
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, os.WNOHANG)[1])
        deadline = time.monotonic() + _REAP_GRACE_S
        while time.monotonic() < deadline:  # the kernel tells once the parent has reaped the process
            reply = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
            with suppress(OSError):  # a kernel before 6.15, or the information is not there yet
                fcntl.ioctl(pidfd, _PIDFD_GET_INFO, reply)
            mask, *_, status = _PIDFD_INFO.unpack(reply)
            if mask & _PIDFD_INFO_EXIT:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
