"""Runs one Python program on several inputs, each time in a process of its own that the kernel keeps apart.

Started by ``verl.utils.sandbox.local`` as a program: a request (JSON) comes in by standard input, a line of JSON per
input goes out. It imports nothing but the standard library, so that it is up in 20 ms, and it never learns what the
program is expected to say. Trusted: it runs no code of the program itself, but forks for it.
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
import types
from typing import Any

SOURCE_NAME = "<solution>"
NOT_ISOLATED, COMPILING, RUNNING = range(3)  # how far a program has come, written where it cannot reach later
WALL_TIME_FACTOR = 2  # a program may wait for the processor as long as it may use it
LOOK_EVERY_S = 0.1
RESULT_FD = 3
UNFINISHED = "the program ended before what was put behind it\n"


def load_isolation() -> types.ModuleType:
    """Load the module beside this one without the package around it."""
    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "isolation.py")
    spec = importlib.util.spec_from_file_location("isolation", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# ---- inside the sandbox


class CompileError(Exception):
    """The program is not valid Python."""


def run_program(request: dict[str, Any], test: dict[str, Any], progress: mmap.mmap, finished: mmap.mmap) -> None:
    """Run the program in this process, as its main module; with a function name, call that and report its value.

    What is put behind the program runs although it has left by ``exit()``: otherwise no assertion would be looked at.
    """
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)
    sys.argv = ["solution.py"]
    main = types.ModuleType("__main__")
    sys.modules["__main__"] = main
    source = request["code"] + test["code_after"]
    behind = "\n" * request["code"].count("\n") + test["code_after"]  # with its own line numbers
    try:
        code = compile(request["code"], SOURCE_NAME, "exec", dont_inherit=True)
        code_after = compile(behind, SOURCE_NAME, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise CompileError("".join(traceback.format_exception_only(error))) from None
    progress[0] = RUNNING
    progress.close()
    linecache.cache[SOURCE_NAME] = (len(source), None, source.splitlines(True), SOURCE_NAME)
    if request["fn_name"]:
        main.__dict__["__name__"] = "solution"  # what stands under `if __name__ == "__main__"` is not asked for
    try:
        exec(code, main.__dict__)
    except SystemExit as end:
        if not test["code_after"] or end.code not in (None, 0):
            raise
    exec(code_after, main.__dict__)
    finished[0] = 1
    if request["fn_name"]:
        value = find_function(main, request["fn_name"])(*test["arguments"])
        reply = json.dumps(value, default=plain)
        os.write(RESULT_FD, reply.encode())


def find_function(module: types.ModuleType, name: str) -> Any:
    """Return a function of the program, or a method of its class ``Solution``."""
    function = getattr(module, name, None)
    if function is None and hasattr(module, "Solution"):
        function = getattr(module.Solution(), name, None)
    if not callable(function):
        raise AttributeError(f"the program defines neither a function {name!r} nor such a method of Solution")
    return function


def plain(value: Any) -> Any:
    """Return what JSON has for a value that it does not know."""
    if isinstance(value, set | frozenset):
        return sorted(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if hasattr(value, "__iter__"):
        return list(value)
    raise TypeError(f"the function returned a {type(value).__name__}")


def enter(
    request: dict[str, Any],
    test: dict[str, Any],
    files: list[int],
    progress: mmap.mmap,
    finished: mmap.mmap,
    isolation: types.ModuleType,
) -> None:
    """Turn this forked process into the program; returns when it has ended by itself."""
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
    except CompileError as error:
        os.write(2, str(error).encode())
        os._exit(1)
    except SystemExit:
        raise
    except BaseException as error:  # whatever a program raises ends it, and is shown
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename != SOURCE_NAME:
            trace = trace.tb_next
        text = "".join(traceback.format_exception(type(error), error, trace or error.__traceback__))
        sys.stdout.flush()
        sys.stderr.write(text)
        sys.exit(1)


# ---- outside of it


def supervise(request: dict[str, Any], test: dict[str, Any], isolation: types.ModuleType) -> dict[str, Any] | None:
    """Run the program on one input and say how it ended; None in the process of the program itself."""
    files = [os.memfd_create(name) for name in ("stdin", "stdout", "stderr", "result")]
    with open(files[0], "wb", closefd=False) as stdin:
        stdin.write(test["stdin"].encode("utf-8", errors="surrogatepass"))
    os.lseek(files[0], 0, os.SEEK_SET)
    progress, finished, start = mmap.mmap(-1, 1), mmap.mmap(-1, 1), time.monotonic()
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


def status_of(code: int, cpu_s: float, request: dict[str, Any]) -> str:
    """Name how a program ended by its exit code."""
    if code in (-signal.SIGXCPU, -signal.SIGKILL) and cpu_s >= request["timeout_s"] * 0.9:
        return "timeout"
    return {0: "ok", -signal.SIGXFSZ: "output limit"}.get(code, "runtime error")


def wait_for(pid: int, deadline: float, request: dict[str, Any]) -> str | None:
    """Wait for the end of the program; kills it at the deadline, or when it fills its folder, and says so."""
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
    """Kill a program with its group, which is larger only where it was not kept apart."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it has no group of its own yet
        os.kill(pid, signal.SIGKILL)


def folder_bytes(folder: str) -> int:
    """Return how much a folder holds; a file counts as a block at least."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += 4096 + os.lstat(os.path.join(parent, name)).st_size
            except FileNotFoundError:
                continue
    return total


def empty_folder(folder: str) -> None:
    """Remove what a program has left."""
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
            return  # the program has ended: this process does what an interpreter does at its end
        sys.stdout.write(json.dumps(result) + "\n")
        sys.stdout.flush()
        if result["status"] == "compile error" or (request["stop_at_failure"] and result["status"] != "ok"):
            return
        empty_folder(request["folder"])


if __name__ == "__main__":
    main()
