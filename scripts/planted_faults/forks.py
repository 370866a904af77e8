"""Run pytest in forks of one process that has imported what most tests need, which takes most of a short run.

Run as ``python forks.py MODULE...`` with the modules to import. Each line of its input is a JSON list: a file for the
output, a module that the fork imports first, and the arguments of pytest. Its answer is a line with the exit code.
"""

import importlib
import json
import os
import sys
import traceback

import pytest


def run(output: str, module: str, *arguments: str) -> int:
    """Run pytest in a fork, and return its exit code; -N for signal N."""
    fork = os.fork()
    if fork:
        return os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    for stream, path, flags in ((0, os.devnull, os.O_RDONLY), (1, output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)):
        os.dup2(os.open(path, flags), stream)
    os.dup2(1, 2)
    code = 1
    try:
        importlib.import_module(module)
        code = int(pytest.main(list(arguments)))
    except BaseException:  # of the module, which may raise anything
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    for line in sys.stdin:
        print(run(*json.loads(line)), flush=True)
