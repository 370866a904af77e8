"""A process pool that enforces deadlines by killing processes."""

import ctypes
import multiprocessing
import os
import signal
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import cloudpickle

PROCESSES_PER_CORE = 4  # more than one, because scorers often wait for a service
START_TIMEOUT_S = 300.0
STARTING = -1
_PR_SET_PDEATHSIG = 1


@dataclass
class DeadlineExceeded:
    """A call that was killed at its deadline, or at the batch's."""

    of_batch: bool = False


@dataclass
class ScorerFailed:
    """A call that raised or whose process died."""

    error: str
    trace: str = ""


@dataclass
class _Slot:
    """A process and its current call: ``STARTING`` until it has imported the function, None if it is idle."""

    process: BaseProcess
    pipe: Connection
    call: int | None
    deadline: float

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        assert self.process.pid is not None
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # it has ended, or has not created its group yet
            self.process.kill()
        self.process.join(timeout=10)
        self.pipe.close()


class DeadlinePool:
    """Runs one function on many arguments in processes that live until the pool is closed or collected.

    A clean server process forks them, so they inherit no locks or threads from this process.
    """

    def __init__(self, function: Callable[..., Any], num_processes: int) -> None:
        if num_processes < 1:
            raise ValueError(f"num_processes must be at least 1, got {num_processes}")
        self.function = _pickle_by_value(function)
        self.size = min(num_processes, PROCESSES_PER_CORE * (os.cpu_count() or 1))
        self._slots: list[_Slot] = []
        weakref.finalize(self, _end_all, self._slots)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_slots"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, _slots=[])
        weakref.finalize(self, _end_all, self._slots)

    def map(self, arguments: Sequence[tuple[Any, ...]], timeout_s: float, batch_timeout_s: float) -> list[Any]:
        """Return the result of every call, or ``DeadlineExceeded`` or ``ScorerFailed``.

        Args: ``timeout_s`` limits one call, ``batch_timeout_s`` all of them, both counted after processes have started.
        """
        results: list[Any] = [None] * len(arguments)
        waiting = list(range(len(arguments)))[::-1]
        while len(self._slots) < min(self.size, len(arguments)):
            self._slots.append(self._start())
        end: float | None = None
        while waiting or any(slot.call not in (None, STARTING) for slot in self._slots):
            for at, slot in enumerate(self._slots):
                if slot.call is None and waiting:
                    content = cloudpickle.dumps(arguments[waiting[-1]])
                    try:
                        slot.pipe.send_bytes(content)
                    except OSError:  # it died after its last call, for instance out of memory
                        slot.end()
                        self._slots[at] = self._start()
                        continue
                    end = end or time.monotonic() + batch_timeout_s
                    slot.call = waiting.pop()
                    slot.deadline = min(time.monotonic() + timeout_s, end)
            busy = [slot for slot in self._slots if slot.call is not None]
            left = min(slot.deadline for slot in busy) - time.monotonic()
            ready = set(wait([slot.pipe for slot in busy], timeout=max(left, 0.0)))
            for slot in busy:
                self._collect(slot, slot.pipe in ready, results, end)
            if end is not None and time.monotonic() >= end:
                for call in waiting:
                    results[call] = DeadlineExceeded(of_batch=True)
                waiting = []
        return results

    def close(self) -> None:
        """Kill the processes."""
        _end_all(self._slots)

    def _collect(self, slot: _Slot, ready: bool, results: list[Any], end: float | None) -> None:
        assert slot.call is not None
        if ready:
            try:
                reply = cloudpickle.loads(slot.pipe.recv_bytes())
                if slot.call != STARTING:
                    results[slot.call] = reply
                slot.call = None
                return
            except (EOFError, OSError):
                slot.process.join(timeout=10)
                if slot.call == STARTING:
                    raise RuntimeError(
                        f"a scorer process could not start: it ended with code {slot.process.exitcode}"
                    ) from None
                results[slot.call] = ScorerFailed(f"its process ended with code {slot.process.exitcode}")
        elif time.monotonic() >= slot.deadline:
            if slot.call == STARTING:
                raise RuntimeError(f"a scorer process did not start within {START_TIMEOUT_S} s")
            results[slot.call] = DeadlineExceeded(of_batch=end is not None and slot.deadline >= end)
        else:
            return
        slot.end()
        self._slots[self._slots.index(slot)] = self._start()

    def _start(self) -> _Slot:
        context = multiprocessing.get_context("forkserver")
        pipe, remote = context.Pipe()
        process = context.Process(target=_serve, args=(remote, self.function), daemon=True)
        process.start()
        remote.close()
        return _Slot(process, pipe, STARTING, time.monotonic() + START_TIMEOUT_S)


def _serve(pipe: Connection, pickled: bytes) -> None:
    os.setsid()  # processes that the function starts join this group and are killed with it
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a hanging call does not outlive the pool
    function = cloudpickle.loads(pickled)
    pipe.send_bytes(cloudpickle.dumps(None))
    while True:
        try:
            arguments = cloudpickle.loads(pipe.recv_bytes())
        except EOFError:
            return
        try:
            reply = cloudpickle.dumps(function(*arguments))
        except (Exception, SystemExit) as error:  # user code raises arbitrary classes; the caller decides
            reply = cloudpickle.dumps(ScorerFailed(f"{type(error).__name__}: {error}", traceback.format_exc()))
        pipe.send_bytes(reply)


def _pickle_by_value(function: Callable[..., Any]) -> bytes:
    """Pickle a function; by value if it was loaded from a user's file, which other processes cannot import."""
    inner = getattr(function, "func", function)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    if module is None or not module.__name__.startswith("verl_external_"):
        return cloudpickle.dumps(function)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(function)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _end_all(slots: list[_Slot]) -> None:
    while slots:
        slots.pop().end()
