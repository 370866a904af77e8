"""Functions in processes that are killed when a call takes too long."""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

import cloudpickle

from verl.utils.processes import die_with_parent, start_process
from verl.utils.time_limit import UserCodeFailed, error_text

Function = Callable[..., Any]
PROCESSES_PER_CORE = 4  # more than one, because scorers often wait for a service
START_TIMEOUT_S = 300.0
STARTING = -1
_SERVE = "import sys; sys.path[:] = {path!r}; from verl.utils.process_pool import serve; serve({pipe})"


@dataclass
class DeadlineExceeded:
    """A call that was killed at its deadline, or at the batch's."""

    of_batch: bool = False


@dataclass
class ScorerFailed:
    """A call that raised or whose process died; ``error`` begins with a verb."""

    error: str
    trace: str = ""


class ProcessStartError(RuntimeError):
    """A process died or took too long while it imported its function."""

    def __init__(self, how: str) -> None:
        super().__init__(f"the import of the scorer in its process {how}")


@dataclass
class _Slot:
    """A process and its current call: ``STARTING`` until it has imported the function, None if it is idle."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    call: int | None
    deadline: float

    @classmethod
    def start(cls, loader: bytes, timeout_s: float = START_TIMEOUT_S) -> "_Slot":
        """Start a process that calls a pickled ``loader``, which returns the function.

        The process inherits no locks or threads from this one.
        """
        pipe, remote = Pipe()
        code = _SERVE.format(path=sys.path, pipe=remote.fileno())
        command = [sys.executable, "-u", "-c", code]  # unbuffered, because it may be killed
        process = start_process(command, stdin=subprocess.DEVNULL, pass_fds=(remote.fileno(),), start_new_session=True)
        remote.close()
        slot = cls(process, pipe, STARTING, time.monotonic() + timeout_s)
        with suppress(OSError):  # it has ended already: the next read tells
            pipe.send_bytes(loader)
        return slot

    def finish_start(self) -> None:
        """Read the reply of a process that has loaded its function.

        Raises: UserCodeFailed if loading raises, ProcessStartError if the process dies.
        """
        try:
            failed = cloudpickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            raise ProcessStartError(self.death()) from None
        if failed is not None:
            raise UserCodeFailed(failed.error, failed.trace)
        self.call = None

    def death(self) -> str:
        """Return how a process ended that has closed its pipe."""
        try:
            code = self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            return "closed its connection"
        return f"ended with {signal.Signals(-code).name if code < 0 else f'code {code}'}"

    def end(self) -> None:
        """Kill the process and all processes that it started."""
        try:
            os.killpg(self.process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            self.process.kill()
        self.pipe.close()
        with suppress(subprocess.TimeoutExpired):  # the kernel holds it, for instance in a read from a dead server
            self.process.wait(timeout=10)


class IsolatedFunction:
    """A function in one process, called as if it were in this one.

    Whatever ends the wait for a result, such as a time limit or Ctrl-C, kills the process, and the next call starts
    another. Where this object is sent to another process, ``local`` takes its place, which is the function itself.

    Args:
        load: returns the function; it runs in the process.
        keywords: further arguments of each call.
        start_timeout_s: seconds for ``load``.
    """

    def __init__(self, load: Callable[[], Function], keywords: dict[str, Any], start_timeout_s: float) -> None:
        self.local: Function | None = None
        self._loader = cloudpickle.dumps(load)
        self._keywords = keywords
        self._start_timeout_s = start_timeout_s
        self._slots: list[_Slot] = []  # none or one
        self._lock = threading.Lock()
        weakref.finalize(self, _end_all, self._slots)

    def __reduce__(self) -> tuple[Any, ...]:
        return _given, (self.local,)

    def start(self) -> None:
        """Start the process unless it runs, and wait until it has loaded the function.

        Raises: UserCodeFailed if ``load`` raises, ProcessStartError if it takes too long or ends its process.
        """
        with self._lock:
            if self._slots and self._slots[0].process.poll() is None:
                return
            _end_all(self._slots)
            with self._ended_by_error() as slot:
                if not slot.pipe.poll(self._start_timeout_s):
                    raise ProcessStartError(f"did not end within {self._start_timeout_s:g} s")
                slot.finish_start()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the result of one call.

        Raises: UserCodeFailed if the function raises or ends its process.
        """
        if not self._slots:
            self.start()
        with self._lock, self._ended_by_error() as slot:
            try:
                slot.pipe.send_bytes(_dumps((args, self._keywords | kwargs)))
                result = cloudpickle.loads(slot.pipe.recv_bytes())
            except (EOFError, OSError):
                raise UserCodeFailed(f"died: its process {slot.death()}") from None
        if isinstance(result, ScorerFailed):
            raise UserCodeFailed(result.error, result.trace)
        return result

    def close(self) -> None:
        """Kill the process."""
        _end_all(self._slots)

    @contextmanager
    def _ended_by_error(self) -> Iterator[_Slot]:
        """Yield the process, started if there is none; kill it if the body raises."""
        try:
            if not self._slots:
                self._slots.append(_Slot.start(self._loader))
            yield self._slots[0]
        except BaseException:
            _end_all(self._slots)
            raise


class DeadlinePool:
    """Runs one function on many arguments in processes that live until the pool is closed or collected."""

    def __init__(self, function: Function, num_processes: int) -> None:
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
        Raises: ProcessStartError if a process cannot load the function.
        """
        results: list[Any] = [None] * len(arguments)
        waiting = list(range(len(arguments)))[::-1]
        while len(self._slots) < min(self.size, len(arguments)):
            self._slots.append(_Slot.start(self.function))
        end: float | None = None
        while waiting or any(slot.call not in (None, STARTING) for slot in self._slots):
            for at, slot in enumerate(self._slots):
                if slot.call is None and waiting:
                    content = _dumps((arguments[waiting[-1]], {}))
                    try:
                        slot.pipe.send_bytes(content)
                    except OSError:  # it died after its last call, for instance out of memory
                        slot.end()
                        self._slots[at] = _Slot.start(self.function)
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
        call = slot.call
        assert call is not None
        if ready and call == STARTING:
            slot.finish_start()
            return
        if ready:
            try:
                results[call] = cloudpickle.loads(slot.pipe.recv_bytes())
                slot.call = None
                return
            except (EOFError, OSError):
                results[call] = ScorerFailed(f"died: its process {slot.death()}")
            except Exception as error:  # of a class that cannot be unpickled here
                results[call] = _failure(error)
        elif time.monotonic() >= slot.deadline:
            if call == STARTING:
                raise ProcessStartError(f"did not end within {START_TIMEOUT_S:g} s")
            results[call] = DeadlineExceeded(of_batch=end is not None and slot.deadline >= end)
        else:
            return
        slot.end()
        self._slots[self._slots.index(slot)] = _Slot.start(self.function)


# ---- in the processes


def serve(descriptor: int) -> None:
    """Load the function that a pipe names first, then answer calls until the pipe is closed."""
    die_with_parent()  # a hanging call does not outlive its caller
    pipe = Connection(descriptor)
    try:
        function = cloudpickle.loads(pipe.recv_bytes())()
    except BaseException as error:  # user code raises arbitrary classes
        pipe.send_bytes(cloudpickle.dumps(_failure(error)))
        return
    pipe.send_bytes(cloudpickle.dumps(None))
    while True:
        try:
            content = pipe.recv_bytes()
        except EOFError:
            return
        try:
            args, keywords = cloudpickle.loads(content)
            reply = _dumps(function(*args, **keywords))
        except BaseException as error:  # the same; the caller decides
            reply = cloudpickle.dumps(_failure(error))
        pipe.send_bytes(reply)


def _dumps(content: Any) -> bytes:
    """Pickle arguments or a result; cloudpickle takes more classes, and ten times as long."""
    try:
        return pickle.dumps(content, pickle.HIGHEST_PROTOCOL)
    except Exception:  # each class that pickle refuses has an error of its kind
        return cloudpickle.dumps(content)


def _failure(error: BaseException) -> ScorerFailed:
    return ScorerFailed(f"raised {error_text(error)}", traceback.format_exc())


def _pickle_by_value(function: Function) -> bytes:
    """Pickle a loader of a function; by value if a user's file defines it, which other processes cannot import."""
    loader = partial(_given, function)
    inner = getattr(function, "func", function)
    module = sys.modules.get(getattr(inner, "__module__", None) or "")
    if module is None or not module.__name__.startswith("verl_external_"):
        return cloudpickle.dumps(loader)
    cloudpickle.register_pickle_by_value(module)
    try:
        return cloudpickle.dumps(loader)
    finally:
        cloudpickle.unregister_pickle_by_value(module)


def _given(function: Function) -> Function:
    return function


def _end_all(slots: list[_Slot]) -> None:
    while slots:
        slots.pop().end()
