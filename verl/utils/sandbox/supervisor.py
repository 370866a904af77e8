"""Run one untrusted Python program on several inputs, each in a new isolated process.

``verl.utils.sandbox.local`` starts this file as a program. It reads one JSON request from standard input and writes one
line of JSON per input. It imports only the standard library, to start in 20 ms. It does not know the expected output,
and it runs the untrusted code only in forked processes.
"""

import importlib.util
import json
import linecache
import mmap
import os
import select
import signal
import sys
import time
import traceback
from types import ModuleType
from typing import Any, TypedDict

SOURCE_NAME = "<solution>"
NOT_ISOLATED, COMPILING, RUNNING = range(3)
"""Progress of a program, in shared memory that it can no longer reach once it runs."""
WALL_TIME_FACTOR = 2  # wall time per CPU time, since a program may wait for a core
LOOK_EVERY_S = 0.1
RESULT_FD = 3
UNFINISHED = "the program ended before the code appended to it\n"


class TestInput(TypedDict):
    """One input, see ``verl.utils.sandbox.Test``."""

    stdin: str
    arguments: list[Any]
    code_after: str


class Request(TypedDict):
    """A program and its inputs, see ``verl.utils.sandbox.run_tests``."""

    code: str
    fn_name: str | None
    tests: list[TestInput]
    timeout_s: float
    memory_limit_mb: int
    output_limit_bytes: int
    stop_at_failure: bool
    isolated: bool
    folder: str


def load_isolation() -> ModuleType:
    """Load ``isolation.py`` from this folder without importing the package."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "isolation.py")
    spec = importlib.util.spec_from_file_location("isolation", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- inside the sandbox


def run_program(request: Request, test: TestInput, progress: mmap.mmap, finished: mmap.mmap) -> None:
    """Run the program as the main module of this process; with a function name, call it and report its value.

    The appended code runs even if the program calls ``exit()``, which would otherwise skip the assertions.
    """
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.argv = ["solution.py"]
    main = ModuleType("__main__")
    sys.modules["__main__"] = main
    source = request["code"] + test["code_after"]
    behind = "\n" * request["code"].count("\n") + test["code_after"]  # keeps the line numbers of ``source``
    try:
        code = compile(request["code"], SOURCE_NAME, "exec", dont_inherit=True)
        code_after = compile(behind, SOURCE_NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        os.write(2, "".join(traceback.format_exception_only(error)).encode())
        os._exit(1)
    progress[0] = RUNNING
    progress.close()
    linecache.cache[SOURCE_NAME] = (len(source), None, source.splitlines(True), SOURCE_NAME)
    if request["fn_name"]:
        main.__dict__["__name__"] = "solution"  # skips code under `if __name__ == "__main__"`
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if not test["code_after"] or end.code not in (None, 0):
            raise
    exec(code_after, main.__dict__)
    finished[0] = 1
    if request["fn_name"]:
        value = find_function(main, request["fn_name"])(*test["arguments"])
        os.write(RESULT_FD, json.dumps(value, default=plain).encode())


def find_function(module: ModuleType, name: str) -> Any:
    """Return the program's function, or the method of its class ``Solution``."""
    function = getattr(module, name, None)
    if function is None and hasattr(module, "Solution"):
        function = getattr(module.Solution(), name, None)
    if not callable(function):
        raise AttributeError(f"the program defines no function {name!r} and no method of that name in Solution")
    return function


def plain(value: Any) -> Any:
    """Convert a set, an array or an iterable for JSON."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__iter__"):
        return list(value)
    raise TypeError(f"the function returned a {type(value).__name__}")


def enter(
    request: Request, test: TestInput, files: list[int], progress: mmap.mmap, finished: mmap.mmap, isolation: ModuleType
) -> None:
    """Isolate this forked process and run the program in it; return when the program ends normally."""
    os.setsid()
    isolation.die_with_parent()
    for target, descriptor in enumerate(files):
        os.dup2(descriptor, target)
    os.closerange(len(files), 1 << 16)
    os.chdir(request["folder"])
    try:
        if request["isolated"]:
            isolation.isolate(request["folder"])
        memory = request["memory_limit_mb"] << 20
        isolation.limit_resources(max(1, -int(-request["timeout_s"] // 1)), memory, request["output_limit_bytes"])
    except OSError as error:
        os.write(RESULT_FD, str(error).encode())
        os._exit(1)
    progress[0] = COMPILING
    try:
        run_program(request, test, progress, finished)
    except SystemExit:
        raise
    except BaseException as error:  # any exception ends the program and is shown on its standard error
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != SOURCE_NAME:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.exit(1)


# ---- outside the sandbox


def supervise(request: Request, test: TestInput, isolation: ModuleType) -> dict[str, Any] | None:
    """Run the program on one input and return how it ended; return None in the forked process."""
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "result")]
    with open(files[0], "wb", closefd=False) as stdin:
        stdin.write(test["stdin"].encode("utf-8", errors="surrogatepass"))
    os.lseek(files[0], 0, os.SEEK_SET)
    progress = mmap.mmap(-1, 1)
    finished = mmap.mmap(-1, 1)
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        enter(request, test, files, progress, finished, isolation)
        return None
    ended_by = wait_for(pid, start + WALL_TIME_FACTOR * request["timeout_s"], request)
    _, status, usage = os.wait4(pid, 0)
    result: dict[str, Any] = {"seconds": time.monotonic() - start, "memory_mb": usage.ru_maxrss / 1024}
    for name, descriptor in zip(("stdout", "stderr", "value"), files[1:], strict=True):
        os.lseek(descriptor, 0, os.SEEK_SET)
        with open(descriptor, "rb") as file:
            result[name] = file.read(request["output_limit_bytes"]).decode("utf-8", errors="replace")
    os.close(files[0])
    code = os.waitstatus_to_exitcode(status)
    result |= {"code": code, "status": ended_by or status_of(code, usage.ru_utime + usage.ru_stime, request)}
    if code != 0 and progress[0] != RUNNING and ended_by is None:
        result["status"] = "not isolated" if progress[0] == NOT_ISOLATED else "compile error"
    if result["status"] == "ok" and test["code_after"] and not finished[0]:
        result |= {"status": "runtime error", "stderr": result["stderr"] + UNFINISHED}
    progress.close()
    finished.close()
    if len(result["stdout"].encode()) >= request["output_limit_bytes"]:
        result["status"] = "output limit"
    return result


def status_of(code: int, cpu_s: float, request: Request) -> str:
    """Return the status of a program from its exit code and CPU time."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_s >= request["timeout_s"] * 0.9:
        return "timeout"
    return {0: "ok", -signal.SIGXFSZ: "output limit"}.get(code, "runtime error")


def wait_for(pid: int, deadline: float, request: Request) -> str | None:
    """Wait for the program; kill it at the deadline or when its folder is too full, and return that status."""
    handle = os.pidfd_open(pid)
    try:
        while True:
            left = deadline - time.monotonic()
            if select.select([handle], [], [], max(0.0, min(left, LOOK_EVERY_S)))[0]:
                return None
            too_full = folder_bytes(request["folder"]) > request["output_limit_bytes"]
            if left <= 0 or too_full:
                kill(pid)
                return "output limit" if too_full else "timeout"
    finally:
        os.close(handle)


def kill(pid: int) -> None:
    """Kill a program and its process group; the group is larger only if the program was not isolated."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # the program has not created its group yet
        os.kill(pid, signal.SIGKILL)


def folder_bytes(folder: str) -> int:
    """Return the bytes in a folder, counting 4 KiB per file in addition to its size."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += 4096 + os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def empty_folder(folder: str) -> None:
    """Delete all files of a folder."""
    import shutil

    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def main() -> None:
    """Answer one request."""
    request = json.loads(sys.stdin.buffer.read())
    isolation = load_isolation()
    isolation.die_with_parent()
    for test in request["tests"]:
        result = supervise(request, test, isolation)
        if result is None:
            return  # the forked process: let the interpreter exit normally, with the program's exit handlers
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        if result["status"] == "compile error" or (request["stop_at_failure"] and result["status"] != "ok"):
            return
        empty_folder(request["folder"])


if __name__ == "__main__":
    main()
