"""Start processes, watch whether they live and how they end, and end them, at the latest with this process."""

import ctypes
import fcntl
import gc
import os
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import psutil

from verl.utils.process import guard, time_limit

_PR_SET_PDEATHSIG = 1
_STARTER = "start-processes"
_PIDFD_GET_INFO = 0xC040FF0B
_PIDFD_INFO = struct.Struct("QQ11Ii")  # struct pidfd_info of Linux 6.15: mask, cgroup, eleven ids, wait status
_PIDFD_INFO_EXIT = 1 << 3
_REAP_GRACE_S = 1.0
_ALLOCATIONS_PER_COLLECTION = 50_000  # Python's own 700 suit a program that holds far fewer objects


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent dies, even if this process is stopped; Linux only.

    To the kernel the parent is the thread that started this process; ``start_process`` starts it from one that lasts.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


@cache
def _starter() -> ThreadPoolExecutor:
    """Return the thread that starts processes, which lives as long as this process."""
    return ThreadPoolExecutor(1, _STARTER)


os.register_at_fork(after_in_child=_starter.cache_clear)  # a forked process has no such thread


def start_process(command: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    """Start a process that calls ``die_with_parent``, so that it lives until this process ends, not only this thread.

    ``options`` go to ``subprocess.Popen``. If the wait for the start is interrupted, the process is killed.
    """
    started = _starter().submit(partial(_popen, command, options))
    with ExitStack() as interrupted:  # if the wait is interrupted, the process is killed once it has started
        interrupted.callback(started.add_done_callback, _kill_started)
        process = started.result()
        interrupted.pop_all()
    return process


def _popen(command: Sequence[str], options: Mapping[str, Any]) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(command, **options)


def _kill_started(started: "Future[subprocess.Popen[bytes]]") -> None:
    if started.exception() is None:
        with started.result() as process:
            process.kill()


def passes_in_fork(check: Callable[[], object]) -> bool:
    """Run a check in a fork of this process, so that this process keeps neither its imports nor its memory.

    Returns: False if the check has failed in the fork, or if no fork is possible: run the check in this process then,
        and its error says why.
    """
    if sys.platform != "linux" or not _has_only_own_threads():
        return False
    parent = os.getpid()
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    code = 1
    try:
        die_with_parent()
        if os.getppid() == parent:
            check()
            sys.stdout.flush()
            code = 0
    finally:
        os._exit(code)  # no handler of the parent runs here, and no trace is shown


def _has_only_own_threads() -> bool:
    """Whether all threads but the main one wait for work of ``start_process`` or ``time_limit`` and hold nothing."""
    others = [each for each in threading.enumerate() if each is not threading.main_thread()]
    own = all(each.name.startswith((_STARTER, time_limit.WATCHER)) for each in others)
    return own and len(os.listdir("/proc/self/task")) == 1 + len(others)


_QUIET = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
_guards: list["subprocess.Popen[bytes]"] = []


def end_with_this_process(processes: Iterable[psutil.Process], folders: Iterable[Path] = ()) -> None:
    """Let a small process kill others as soon as this one has ended, even by SIGKILL, and remove folders of files."""
    guards = {each.pid for each in _guards}  # guards end by themselves after their work
    others = [process.pid for process in processes if process.pid not in guards]
    _guards.append(_start_guard(others, [str(folder.absolute()) for folder in folders]))


@contextmanager
def guarded_group() -> Iterator[int]:
    """Yield a process group; kill its processes if the block fails, or if this process ends within the block.

    These processes may start further ones, which cannot all be listed, so the whole group is killed. A separate group
    gets no signal of the terminal, nor one that a scheduler sends to the group of this process.
    """
    leader = _start_guard([], [guard.GROUP], process_group=0)
    _guards.append(leader)
    try:
        with ExitStack() as failed:
            failed.callback(os.killpg, leader.pid, signal.SIGKILL)
            yield leader.pid
            failed.pop_all()
    finally:
        leader.kill()
        leader.wait()
        _guards.remove(leader)


def _start_guard(processes: Iterable[int], words: Sequence[str], **options: Any) -> "subprocess.Popen[bytes]":
    handles = [os.pidfd_open(os.getpid())]
    for process in processes:
        with suppress(ProcessLookupError):
            handles.append(os.pidfd_open(process))
    command = [sys.executable, "-I", "-S", guard.__file__, *map(str, handles), *words]
    # The guard keeps this mask, since it must not end before this process does.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        return _popen(command, {"pass_fds": handles} | _QUIET | options)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for handle in handles:
            os.close(handle)


def oom_kills() -> int | None:
    """Return the number of processes that the kernel has killed for lack of memory; None if it does not tell."""
    with suppress(OSError):
        for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return None


def out_of_memory_since(before: int | None) -> str:
    """Return a clause that tells of processes killed for lack of memory since ``oom_kills`` was ``before``, or ""."""
    now = oom_kills()
    if before is None or now is None or now <= before:
        return ""
    return "; since then the kernel has killed a process on this machine because memory ran out"


def collect_garbage_rarely() -> None:
    """Run Python's cyclic garbage collector seldom enough that imports do not wait for it.

    The imports of a worker (torch, transformers, vLLM) create 750,000 objects. With the default threshold the collector
    visits them again and again, which takes a fifth of the CPU time of the imports and frees almost nothing.
    """
    gc.set_threshold(_ALLOCATIONS_PER_COLLECTION)


def descendants() -> set[psutil.Process]:
    """Return the processes that this one has started, directly or not, without the guards, which end by themselves."""
    guards = {each.pid for each in _guards}
    return {process for process in psutil.Process().children(recursive=True) if process.pid not in guards}


def end_all(processes: Iterable[psutil.Process], only_stopped: bool = False) -> None:
    """Kill processes that still exist; with ``only_stopped``, only processes that SIGSTOP holds."""
    for process in processes:
        try:
            if not only_stopped or process.status() == psutil.STATUS_STOPPED:
                process.kill()
        except psutil.NoSuchProcess:
            continue


def is_stopped(pid: int) -> bool:
    """Whether SIGSTOP holds a process of this machine."""
    try:
        return bool(psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    except psutil.NoSuchProcess:
        return False


class WatchedProcess:
    """A process on this machine that need not be a child of this one, and may have died already."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self._oom_kills = oom_kills()
        self._pidfd: int | None = None
        with suppress(ProcessLookupError):
            self._pidfd = os.pidfd_open(pid)

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid})"

    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds the process."""
        return is_stopped(self.pid)

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
            how = "has died: SIGKILL, os._exit, or a crash (the system does not tell which)"
            return how + out_of_memory_since(self._oom_kills)
        if code >= 0:
            return f"has ended with exit code {code}"
        memory = out_of_memory_since(self._oom_kills) if code == -signal.SIGKILL else ""
        return f"was killed by {signal.Signals(-code).name}{memory}"

    def _exit_code(self, pidfd: int) -> int | None:
        """Return the exit code of the ended process, negative for a signal; None if the kernel keeps none."""
        with suppress(ChildProcessError):  # not a child, or reaped already
            return os.waitstatus_to_exitcode(os.waitpid(self.pid, os.WNOHANG)[1])
        deadline = time.monotonic() + _REAP_GRACE_S
        # Somebody else's child: only its parent can read the exit code. Linux 6.15 and later keep it for holders of a
        # pidfd.
        while time.monotonic() < deadline:  # the kernel tells once the parent has reaped the process
            reply = bytearray(_PIDFD_INFO.pack(_PIDFD_INFO_EXIT, *[0] * 13))
            with suppress(OSError):  # a kernel before 6.15, or the information is not there yet
                fcntl.ioctl(pidfd, _PIDFD_GET_INFO, reply)
            mask, *_, status = _PIDFD_INFO.unpack(reply)
            if mask & _PIDFD_INFO_EXIT:
                return os.waitstatus_to_exitcode(status)
            time.sleep(0.05)
        return None
