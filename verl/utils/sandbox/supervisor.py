"""Run one untrusted Python program on several inputs, each in a new isolated process.

``verl.utils.sandbox.local`` starts this file as a program. It reads one JSON request from standard input and writes one
line of JSON per input. It imports only the standard library, to start in 20 ms. It runs the untrusted code only in
forked processes, which inherit its memory: so it holds neither expected outputs nor test code. A test with code has two
processes, the program's and a checker, which reads its code from a file that only the checker keeps open.
"""

import importlib.util
import json
import math
import mmap
import os
import select
import signal
import sys
import time
import traceback
from contextlib import suppress
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypedDict

if TYPE_CHECKING:
    from verl.utils.json_types import Json
    from verl.utils.sandbox.clock import Clock

NOT_ISOLATED, COMPILING, RUNNING = range(3)
"""Progress of a program, in shared memory that it can no longer reach once it runs."""
LOOK_EVERY_S = 0.1
SIGN_OF_LIFE_EVERY_S = 1.0
MOST_ROUNDS = 1000
"""Number of attempts to kill processes that a program has started: between attempts they may start others."""
ERROR_TAIL_BYTES = 1 << 16
"""Bytes of a program's errors that are kept."""
SUPERVISOR = os.getpid()
RESULT_FD = 3
PIPES = (4, 5)
"""Descriptors by which a program and its checker exchange values."""


class TestInput(TypedDict):
    """One input, see ``verl.utils.sandbox.Test``."""

    stdin: str
    arguments: "list[Json]"
    test_code: list[int] | None
    """Offset and length of the code in the file ``Request.tests_fd``."""


class Request(TypedDict):
    """A program and its inputs, see ``verl.utils.sandbox.run_tests``."""

    code: str
    fn_name: str | None
    tests: list[TestInput]
    todo: list[int]
    """Indices of the tests to run."""
    timeout_s: float
    memory_limit_mb: int
    output_limit_bytes: int
    stop_at_failure: bool
    isolated: bool
    folder: str
    tests_fd: int
    reports_fd: int
    """File in which a checker writes why a test failed, one line of JSON with the index and the reason."""


def load(name: str) -> ModuleType:
    """Load a module or a package of this folder without importing the package that holds it.

    It leaves no trace in ``sys.modules``, where a program would find it.
    """
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), name)
    is_package = os.path.isdir(path)
    file = os.path.join(path, "__init__.py") if is_package else f"{path}.py"
    spec = importlib.util.spec_from_file_location(name, file, submodule_search_locations=[path] if is_package else None)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    for loaded in [each for each in sys.modules if each.partition(".")[0] == name]:
        del sys.modules[loaded]
    return module


clock = load("clock")
exchange = load("exchange")
folder = load("folder")
isolation = load("isolation")
sys.dont_write_bytecode = True  # no bytecode of the program's modules; above, bytecode saves 50 ms


# ---- inside the sandbox


def run_program(request: Request, test: TestInput, progress: mmap.mmap) -> None:
    """Run the program as the main module of this process; with a function name, call it and report its value."""
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.argv = ["solution.py"]
    try:
        code = compile(request["code"], exchange.PROGRAM_NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        os.write(2, "".join(traceback.format_exception_only(error)).encode())
        os._exit(1)
    progress[0] = RUNNING
    progress.close()
    pipes = PIPES if test["test_code"] else None
    value = exchange.run_program(code, request["code"], request["fn_name"], test["arguments"], pipes)
    if value is not None:
        os.write(RESULT_FD, value.encode())


def confine(request: Request, files: list[int]) -> None:
    """Isolate this forked process, which keeps only the given files, numbered from 0."""
    # A session of its own has no terminal, and its processes can be killed as a group.
    os.setsid()
    isolation.die_with_parent(SUPERVISOR)
    exchange.keep_files(files)
    os.chdir(request["folder"])
    if request["isolated"]:
        isolation.isolate(request["folder"])
    memory = request["memory_limit_mb"] << 20
    # The kernel counts whole seconds of CPU, the supervisor's clock is finer: this limit is for a program that the
    # supervisor cannot see in time.
    cpu_s = math.ceil(request["timeout_s"] + clock.OVERHEAD_CPU_S)
    isolation.limit_resources(cpu_s, memory, request["output_limit_bytes"])


def enter_program(request: Request, test: TestInput, files: list[int], progress: mmap.mmap) -> None:
    """Isolate this forked process and run the program in it; return when the program ends normally."""
    try:
        confine(request, files)
    except OSError as error:
        os.write(RESULT_FD, str(error).encode())
        os._exit(1)
    progress[0] = COMPILING
    try:
        run_program(request, test, progress)
    except SystemExit:
        raise
    except BaseException as error:  # any exception ends the program and is shown on its standard error
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != exchange.PROGRAM_NAME:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.exit(1)


def enter_checker(request: Request, index: int, pipes: tuple[int, int]) -> NoReturn:
    """Isolate this forked process, run the test code in it, report why it failed, and exit with the verdict."""
    code = exchange.FAILED
    try:
        null = os.open(os.devnull, os.O_RDWR)
        confine(request, [null, null, null, request["tests_fd"], *pipes, request["reports_fd"]])
        sys.stdin = open(0, closefd=False, encoding="utf-8")
        sys.stdout = sys.stderr = open(1, "w", closefd=False, encoding="utf-8")
        offset, length = request["tests"][index]["test_code"] or (0, 0)
        test_code = os.pread(RESULT_FD, length, offset).decode("utf-8", errors="surrogatepass")
        os.close(RESULT_FD)
        code, reason = exchange.check(test_code, PIPES)
        if reason:
            os.write(PIPES[1] + 1, json.dumps([index, reason]).encode() + b"\n")
    finally:
        os._exit(code)


# ---- outside the sandbox


def supervise(request: Request, index: int) -> dict[str, Any] | None:
    """Run the program on one input and return how it ended; return None in the forked process."""
    test = request["tests"][index]
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "result")]
    with open(files[0], "wb", closefd=False) as stdin:
        stdin.write(test["stdin"].encode("utf-8", errors="surrogatepass"))
    os.lseek(files[0], 0, os.SEEK_SET)
    pipes = [*os.pipe(), *os.pipe()] if test["test_code"] else []
    progress = mmap.mmap(-1, 1)
    pid = os.fork()
    if pid == 0:
        # The program reads from the first pipe and writes to the second, the checker the reverse. Each keeps only its
        # own ends, or a reader would never see the end of its input.
        enter_program(request, test, files + pipes[:1] + pipes[3:], progress)
        return None
    checker = verdict = ended_by = None
    if pipes:
        checker = os.fork()
        if checker == 0:
            enter_checker(request, index, (pipes[2], pipes[1]))
        for descriptor in pipes:
            os.close(descriptor)
    used = watch(pid, checker, request["isolated"], request["timeout_s"])
    if checker:
        ended_by = wait_for(checker, used, request)
        verdict = os.waitstatus_to_exitcode(os.wait4(checker, 0)[1])
        # A program may run on after its test has failed, and wait for a checker that has gone.
        if verdict != exchange.PASSED:
            kill(pid)
    ended_by = ended_by or wait_for(pid, used, request)
    _, status, usage = os.wait4(pid, 0)
    if not request["isolated"]:
        kill_others()
    if ended_by is None and folder.is_too_full(request["folder"], request["output_limit_bytes"]):
        ended_by = "output limit"
    result: dict[str, Any] = {"seconds": used.counted_s, "memory_mb": usage.ru_maxrss / 1024}
    for name, descriptor in zip(("stdout", "stderr", "value"), files[1:], strict=True):
        size = os.fstat(descriptor).st_size
        first = max(0, size - ERROR_TAIL_BYTES) if name == "stderr" else 0
        result[name] = os.pread(descriptor, request["output_limit_bytes"], first).decode("utf-8", errors="replace")
        os.close(descriptor)
    os.close(files[0])
    code = os.waitstatus_to_exitcode(status)
    cpu_s = max(usage.ru_utime + usage.ru_stime, used.cpu_s)
    result |= {"index": index, "code": code, "status": ended_by or status_of(code, cpu_s, used.cpu_limit_s, request)}
    if code > 0 and progress[0] != RUNNING and ended_by is None:  # a checker that fails early may have killed it
        result["status"] = "not isolated" if progress[0] == NOT_ISOLATED else "compile error"
    elif verdict not in (None, exchange.PASSED) and result["status"] in ("ok", "runtime error"):
        result["status"] = checker_status(verdict)
    progress.close()
    if len(result["stdout"].encode()) >= request["output_limit_bytes"]:
        result["status"] = "output limit"
    return result


def checker_status(code: int) -> str:
    """Return the status of a program whose checker ended with a code other than ``PASSED``."""
    return {exchange.REFUSED: "refused", -signal.SIGXCPU: clock.CPU}.get(code, "runtime error")


def status_of(code: int, cpu_s: float, cpu_limit_s: float, request: Request) -> str:
    """Return the status of a program from its exit code and CPU time."""
    killed = code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_s >= request["timeout_s"] * 0.9
    if killed or cpu_s > cpu_limit_s:
        return str(clock.CPU)
    return {0: "ok", -signal.SIGXFSZ: "output limit"}.get(code, "runtime error")


def watch(pid: int, checker: int | None, isolated: bool, timeout_s: float) -> "Clock":
    """Return a clock for a program and its checker. Only programs that are not isolated have processes below them."""

    def below_checker() -> list[int]:
        return [] if checker is None else [checker] if isolated else [checker, *clock.descendants(checker)]

    def program() -> list[int]:
        return [pid] if isolated else [each for each in clock.descendants(SUPERVISOR) if each not in below_checker()]

    return clock.Clock(timeout_s, program, below_checker)


def wait_for(pid: int, used: "Clock", request: Request) -> str | None:
    """Wait for the program; kill it when its time is used up or its folder is too full, and return that status."""
    handle = os.pidfd_open(pid)
    sign_of_life = time.monotonic()
    try:
        while True:
            left_s = used.cpu_limit_s - used.cpu_s
            has_ended = select.select([handle], [], [], min(max(left_s, LOOK_EVERY_S / 10), LOOK_EVERY_S))[0]
            ended_by = used.look()
            if has_ended:
                return None
            if folder.is_too_full(request["folder"], request["output_limit_bytes"]):
                ended_by = "output limit"
            if ended_by is not None:
                kill(pid)
                return ended_by
            if time.monotonic() > sign_of_life + SIGN_OF_LIFE_EVERY_S:
                sign_of_life = time.monotonic()
                sys.stdout.write("\n")  # a sign of life
                sys.stdout.flush()
    finally:
        os.close(handle)


def kill(pid: int) -> None:
    """Kill a program and its process group; the group is larger only if the program was not isolated."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # the program has not created its group yet
        os.kill(pid, signal.SIGKILL)


def kill_others() -> None:
    """Kill processes that a program without isolation left behind, inside or outside its process group."""
    # A process that is killed may have just started another one, so this looks again until none is left. The supervisor
    # has adopted all orphans, so it can wait for each.
    for _ in range(MOST_ROUNDS):
        for pid in clock.descendants(SUPERVISOR):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:  # none is left
            return


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.read())
    isolation.die_with_parent()
    isolation.adopt_orphans()
    for index in request["todo"]:
        result = supervise(request, index)
        if result is None:
            return  # the forked process: let the interpreter exit normally, with the program's exit handlers
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        if result["status"] == "compile error" or (request["stop_at_failure"] and result["status"] != "ok"):
            return
        folder.empty_folder(request["folder"])


if __name__ == "__main__":
    main()
