"""Runs commands one after another, each in a fork of a process that has imported what the launching process imports:
as exact as a process of its own, and much faster. Its arguments are modules that it imports as well.

Reads requests from standard input and writes answers to standard output, each a line of JSON.
"""

import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

REACHED_RAY = 70
"""Exit code of a command that was not refused before it would have started Ray."""
HUNG = 71
"""Exit code for a command that had to be ended."""
LIMIT_S = 60
"""Time limit for a command on an idle machine; on one with other work it is longer."""
HEAVY = ("torch", "transformers", "vllm")
LIGHT_COMMANDS = ("verl.trainer.main_ppo",)
"""Commands whose launching process imports none of the heavy packages."""


def main() -> None:
    """Serve until the input ends."""
    import ray

    import verl.trainer.main_ppo
    import verl.trainer.preflight
    import verl.trainer.run.launch  # noqa: F401  # as the command does, in time that all forks share

    for module in sys.argv[1:]:
        importlib.import_module(module)
    ray.init = _no_ray
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            _run(request)
        code = _wait(process)
        sys.stdout.write(json.dumps({"code": code}) + "\n")
        sys.stdout.flush()


def _wait(process: int) -> int:
    """Return the exit code of a fork; end it if it takes too long."""
    deadline = time.monotonic() + LIMIT_S * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1))
    while time.monotonic() < deadline:
        done, status = os.waitpid(process, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(process, signal.SIGKILL)
    os.waitpid(process, 0)
    return HUNG


def _no_ray(**options: Any) -> None:
    sys.exit(REACHED_RAY)


def _run(request: dict[str, Any]) -> None:
    """Run the command of a request in this process, and end it as the interpreter would."""
    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(request["folder"])
    sys.path.insert(0, request["folder"])  # as python -m does
    os.environ.update(request["environment"])
    sys.argv = [request["command"], *request["words"]]
    code: Any = 0
    try:
        code = importlib.import_module(request["command"]).main()
    except SystemExit as stop:
        code = stop.code
    except BaseException:  # as an interpreter does at its top: print it, and end with code 1
        traceback.print_exc()
        code = 1
    loaded = [name for name in HEAVY if name in sys.modules and request["command"] in LIGHT_COMMANDS]
    if loaded:
        sys.stderr.write(f"the launching process has imported {loaded}\n")
        code = REACHED_RAY
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
