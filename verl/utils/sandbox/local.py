"""Run untrusted Python programs on this machine, isolated by the kernel under a supervisor process."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, Any

from verl.errors import SandboxError
from verl.utils.json_types import Json, JsonObject
from verl.utils.sandbox import clock, cores
from verl.utils.sandbox.folder import empty_folder
from verl.utils.sandbox.permits import FilePermits
from verl.utils.temporary import SANDBOX, TemporaryFolder

SUPERVISOR = Path(__file__).with_name("supervisor.py")
OUTPUT_LIMIT_BYTES = 4 << 20
SILENCE_TIMEOUT_S = 60.0
"""Time after which a supervisor that gives no sign of life does not run."""
CANCEL_LATENCY_S = 0.1
"""Longest time until a run notices that it is cancelled."""
_LOOK_EVERY_S = 1.0
_LOOK_FOR_CORE_EVERY_S = 0.02
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # makes programs deterministic
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
}


Result = dict[str, Any]
"""Report of the supervisor on one test: the fields of ``Run`` and ``index``. A status may be one of ``clock``."""


@dataclass(frozen=True)
class Test:
    """Input of one run: standard input, or arguments of a function.

    ``code_after`` is test code that uses the program's names. It runs in another process and must reach its end.
    """

    __test__ = False

    stdin: str = ""
    arguments: Sequence[Json] = field(default_factory=tuple)
    code_after: str = ""


@dataclass(frozen=True)
class Run:
    """The result of a program.

    ``ok``, ``runtime error`` (also if the test code failed), ``timeout``, ``compile error``, ``output limit``, or
    ``refused`` if the test code cannot run apart from the program.
    """

    status: str
    stdout: str
    stderr: str
    code: int
    seconds: float
    """CPU time and time asleep of the program and its test, without the time in wait for a core."""
    memory_mb: float
    value: str = ""
    """The value that the function returned, as JSON."""


@cache
def isolation_problem() -> str | None:
    """Return why this machine cannot isolate a program; None if it can. Tries it once, which takes 50 ms."""
    try:
        probe = "import socket\ntry:\n    socket.socket()\nexcept PermissionError:\n    print('apart')"
        run = run_tests(probe, [Test()], timeout_s=5.0)[0]
    except SandboxError as error:
        return str(error)
    return None if run.stdout == "apart\n" else f"the kernel did not refuse a socket: {run.stdout}{run.stderr}"


def run_tests(
    code: str,
    tests: Sequence[Test],
    fn_name: str | None = None,
    timeout_s: float = 10.0,
    memory_limit_mb: int = 1024,
    allow_unisolated: bool = False,
    stop_at_failure: bool = False,
    cancelled: threading.Event | None = None,
) -> list[Run]:
    """Run a program once per test. Stop if it does not compile or, with ``stop_at_failure``, at the first failure.

    A run waits for a free core, since all programs of this machine share its cores. A run that was idle for too long is
    repeated, see ``_run_each``.

    Args:
        fn_name: function, or method of the class ``Solution``, to call with the arguments of each test.
        timeout_s: CPU time of each run; it may sleep for twice that. Time in wait for a core does not count.
        allow_unisolated: if the kernel cannot isolate the program, run it with the rights of this process.
        cancelled: kill the program when another thread sets it.

    Raises: SandboxError if the program cannot be isolated or the supervisor fails, or if the runs are cancelled.
    """
    isolated = not (allow_unisolated and isolation_problem() is not None)
    with (
        _program_folder() as folder,
        tempfile.TemporaryFile() as test_file,
        tempfile.TemporaryFile() as reports,
    ):
        inputs = [_input(test, test_file) for test in tests]
        test_file.flush()
        request: JsonObject = {
            "code": code,
            "fn_name": fn_name,
            "tests": inputs,
            "timeout_s": timeout_s,
            "memory_limit_mb": memory_limit_mb,
            "output_limit_bytes": OUTPUT_LIMIT_BYTES,
            "stop_at_failure": stop_at_failure,
            "isolated": isolated,
            "folder": os.path.realpath(folder),
            "tests_fd": test_file.fileno(),
            "reports_fd": reports.fileno(),
        }
        try:
            results = _run_each(request, len(tests), (test_file.fileno(), reports.fileno()), cancelled)
        finally:
            with suppress(OSError):  # a program that dies with its supervisor may still write
                empty_folder(folder)
        reports.seek(0)
        reasons = _reasons(reports)
    for result in results:
        result["stderr"] += reasons.get(result.pop("index"), "")
        if result["status"] in (clock.CPU, clock.IDLE):
            result["status"] = "timeout"
    return [Run(**result) for result in results]


@contextmanager
def _program_folder() -> Iterator[str]:
    """Yield a new folder for a program."""
    folder = TemporaryFolder(SANDBOX)
    try:
        place = folder.path / "work"
        place.mkdir()
        yield str(place)
    finally:
        folder.remove()


def _run_each(
    request: JsonObject, num_tests: int, files: Sequence[int], cancelled: threading.Event | None
) -> list[Result]:
    """Return the results of the tests, in order.

    A program that the clock ended though it did not use its CPU time is tried once more, one such program at a time on
    this machine. The first result counts if the second try of another test has ended in the same way, or if there were
    too many second tries.
    """
    results: dict[int, Result] = {}
    todo = list(range(num_tests))
    is_confirmed = False
    while todo:
        with _core(cancelled):
            found = _reply(request | {"todo": todo}, files, cancelled)
        goes_on = False
        for result in found:
            if result["status"] in (clock.IDLE, clock.STARVED) and not is_confirmed and cores.may_try_again():
                index = result["index"]
                with _permit(cores.second_core(), cancelled, CANCEL_LATENCY_S), _core(cancelled):
                    (result,) = _reply(request | {"todo": [index]}, files, cancelled)
                is_confirmed = result["status"] in (clock.IDLE, clock.STARVED)
                goes_on = result["status"] == "ok"
            if result["status"] == "not isolated":
                raise SandboxError(f"this machine cannot isolate untrusted code: {result['value']}")
            if result["status"] == clock.STARVED:
                raise SandboxError("this machine gave the program no core")
            results[result["index"]] = result
        todo = [index for index in todo if index > max(results, default=0)] if goes_on else []
    return [results[index] for index in sorted(results)]


@contextmanager
def _permit(permits: FilePermits, cancelled: threading.Event | None, look_every_s: float) -> Iterator[None]:
    """Wait for a permit and hold it.

    Raises: SandboxError if the run is cancelled.
    """
    while (permit := permits.try_take()) is None:
        if cancelled is not None and cancelled.is_set():
            raise SandboxError("the run was cancelled")
        time.sleep(look_every_s)
    try:
        yield
    finally:
        permits.give_back(permit)


@contextmanager
def _core(cancelled: threading.Event | None) -> Iterator[None]:
    """Wait for a core that no other program under test has, and hold it; one run of the machine looks for it."""
    with ExitStack() as stack:
        with _permit(cores.waiting_line(), cancelled, CANCEL_LATENCY_S):
            stack.enter_context(_permit(cores.cores(), cancelled, _LOOK_FOR_CORE_EVERY_S))
        yield


def _reply(request: JsonObject, files: Sequence[int], cancelled: threading.Event | None) -> list[Result]:
    """Return the first message of a new supervisor; empty lines are its signs of life."""
    reply = _supervise(json.dumps(request), SILENCE_TIMEOUT_S, files, cancelled)
    return [json.loads(line) for line in reply.splitlines() if line]


def _input(test: Test, file: IO[bytes]) -> JsonObject:
    """Return the supervisor's form of a test, without the test code, which goes to the end of a file."""
    code = test.code_after.encode("utf-8", errors="surrogatepass")
    place = [file.tell(), file.write(code)] if code else None
    return {"stdin": test.stdin, "arguments": list(test.arguments), "test_code": place}


def _reasons(reports: IO[bytes]) -> dict[int, str]:
    """Return why tests failed, by index. A checker that is killed may leave half a line."""
    reasons = {}
    for line in reports:
        with suppress(ValueError):
            index, reason = json.loads(line)
            reasons[index] = reason
    return reasons


def _supervise(request: str, timeout_s: float, files: Sequence[int], cancelled: threading.Event | None = None) -> str:
    """Send a request to a new supervisor, which inherits the files, and return its reply.

    Raises: SandboxError if it gives no sign of life for ``timeout_s``, fails, or is cancelled.
    """
    process = subprocess.Popen(
        [sys.executable, "-s", "-P", str(SUPERVISOR)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=_ENVIRONMENT,
        cwd="/",
        start_new_session=True,
        pass_fds=files,
    )
    try:
        reply, errors = _communicate(process, request.encode("utf-8", errors="surrogatepass"), timeout_s, cancelled)
    finally:
        if process.poll() is None:  # timed out or interrupted; the program dies with its supervisor
            below = clock.descendants(process.pid)  # a process that a program without isolation has started does not
            os.killpg(process.pid, signal.SIGKILL)
            for pid in below:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            process.wait()
    if process.returncode != 0 and not reply:
        raise SandboxError(f"the sandbox supervisor failed: {errors.decode(errors='replace').strip()[-500:]}")
    return reply.decode("utf-8")


def _communicate(
    process: "subprocess.Popen[bytes]", request: bytes, timeout_s: float, cancelled: threading.Event | None
) -> tuple[bytes, bytes]:
    """Return output and errors of the supervisor.

    Raises: SandboxError if it is silent for ``timeout_s``, or cancelled.
    """
    end = time.monotonic() + timeout_s
    content: bytes | None = request
    said = 0
    while True:
        try:
            return process.communicate(content, timeout=_LOOK_EVERY_S if cancelled is None else CANCEL_LATENCY_S)
        except subprocess.TimeoutExpired as error:
            content = None  # the next call continues to send it
            if len(error.output or b"") > said:
                said = len(error.output)
                end = time.monotonic() + timeout_s
        if cancelled is not None and cancelled.is_set():
            raise SandboxError("the run was cancelled")
        if time.monotonic() >= end:
            raise SandboxError(f"the sandbox supervisor gave no sign of life for {timeout_s:g} s")
