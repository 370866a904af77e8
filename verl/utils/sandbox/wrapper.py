"""Run a program and its test in one request to a remote service.

``script`` makes what the service runs: the sources of this module and of the package ``exchange``, which need nothing
but the standard library. The test code comes on standard input, after the script has started a second process for the
program.
"""

import contextlib
import ctypes
import json
import os
import resource
import sys
import tempfile
from functools import cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from verl.utils.json_types import Json

# Exit codes of the script, which Python does not use
DOES_NOT_COMPILE = 86
ONE_PROCESS = 87
REFUSED = 88
_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4


def script(
    source: str, fn_name: str | None, arguments: "list[Json]", stdin: str, timeout_s: float, has_test: bool
) -> str:
    """Return the script for a program. Its standard input is a JSON list of a mark and the test code."""
    given = json.dumps([source, fn_name, arguments, stdin, timeout_s])
    run = "run_apart" if has_test else "run_here"
    return f"{_sources()}\n{run}(exchange, *json.loads({given!r}))"


@cache
def _sources() -> str:
    """Return this module and a line that makes ``exchange`` from the sources of its modules."""
    from verl.utils.sandbox import exchange

    this = Path(__file__)
    names = (*exchange.MODULES, "__init__")
    parts = {name: (this.with_name("exchange") / f"{name}.py").read_text(encoding="utf-8") for name in names}
    return f"{this.read_text(encoding='utf-8')}\nexchange = unpacked({parts!r})"


def unpacked(sources: dict[str, str]) -> ModuleType:
    """Return the package ``exchange``, made from the sources of its modules in order of import.

    It leaves no trace in ``sys.modules``, where a program would find it.
    """
    package = ModuleType("exchange")
    package.__path__ = []  # makes it a package; all its modules are in sys.modules before they are imported
    loaded = {"exchange": package}
    for name, source in sources.items():
        module = package if name == "__init__" else ModuleType(f"exchange.{name}")
        module.__package__ = "exchange"
        loaded[module.__name__] = module
        sys.modules |= loaded
        exec(compile(source, f"<{module.__name__}>", "exec"), module.__dict__)
        setattr(package, name, module)
    for name in loaded:
        del sys.modules[name]
    return package


def run_here(
    exchange: ModuleType, source: str, fn_name: str, arguments: "list[Json]", stdin: str, timeout_s: float
) -> None:
    """Run the program in this process and print its function's value between two marks.

    A program that finds the mark can print another value, which it could return as well.
    """
    code = _compiled(source, exchange.PROGRAM_NAME)
    mark, _ = json.loads(sys.stdin.buffer.read())
    output = os.dup(1)
    value = exchange.run_program(code, source, fn_name, arguments, None)
    sys.stdout.flush()
    os.write(output, f"{mark}{value}{mark}".encode())


def run_apart(
    exchange: ModuleType, source: str, fn_name: str | None, arguments: "list[Json]", stdin: str, timeout_s: float
) -> None:
    """Run the program in a second process, its test in this one; if it passes, print the value between two marks."""
    code = _compiled(source, exchange.PROGRAM_NAME)
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)  # the program cannot read this process
    requests = os.pipe()
    answers = os.pipe()
    given = tempfile.TemporaryFile()
    given.write(stdin.encode("utf-8", errors="surrogatepass"))
    given.seek(0)
    result = tempfile.TemporaryFile()
    try:
        program = os.fork()
    except OSError:
        sys.exit(ONE_PROCESS)
    if program == 0:
        pipes = _keep(exchange, [given.fileno(), 1, 2, result.fileno(), requests[0], answers[1]], timeout_s)
        value = exchange.run_program(code, source, fn_name, arguments, pipes)
        if value is not None:
            os.write(3, value.encode())
        return
    os.close(requests[0])
    os.close(answers[1])
    here = {"", os.getcwd(), os.path.dirname(os.path.abspath(sys.argv[0]))}
    sys.path[:] = [path for path in sys.path if path not in here]  # the program may write modules there
    mark, test_code = json.loads(sys.stdin.buffer.read())
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stdout(nowhere):
        verdict, reason = exchange.check(test_code, (answers[0], requests[1]))
    if verdict != exchange.PASSED:
        os.write(2, reason.encode(errors="replace"))
        os._exit(REFUSED if verdict == exchange.REFUSED else 1)  # this kills the program too
    os.close(requests[1])
    exit_code = os.waitstatus_to_exitcode(os.waitpid(program, 0)[1])
    if exit_code == 0:
        result.seek(0)
        os.write(1, f"{mark}{result.read().decode() or 'null'}{mark}".encode())
    os._exit(exit_code if exit_code >= 0 else 1)


def _compiled(source: str, name: str) -> CodeType:
    try:
        return compile(source, name, "exec", dont_inherit=True)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        sys.stderr.write(str(error))
        sys.exit(DOES_NOT_COMPILE)


def _keep(exchange: ModuleType, files: list[int], timeout_s: float) -> tuple[int, int]:
    """Number the files of the program's process from 0, close all others, and end it with its parent or its time."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, 9, 0, 0, 0)
    limit = int(timeout_s) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (limit, limit))
    exchange.keep_files(files)
    sys.stdin = open(0, encoding="utf-8", errors="replace", closefd=False)
    return 4, 5
