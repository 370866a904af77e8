"""Runs command lines of ``main_ppo`` one after another, each in a fork of a process that has imported what the
launching process imports: as exact as a process of its own, and much faster.

Reads requests from standard input and writes answers to standard output, each a line of JSON.
"""

import json
import os
import sys
from typing import Any

REACHED_RAY = 70
"""Exit code of a command that was not refused before it would have started Ray."""
HEAVY = ("torch", "transformers", "vllm")


def main() -> None:
    """Serve until the input ends."""
    import ray

    import verl.trainer.main_ppo
    import verl.trainer.preflight
    import verl.trainer.run.launch  # noqa: F401  # as the command does, in time that all forks share

    ray.init = _no_ray
    for line in sys.stdin:
        request = json.loads(line)
        process = os.fork()
        if not process:
            _run(request)
        code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
        sys.stdout.write(json.dumps({"code": code}) + "\n")
        sys.stdout.flush()


def _no_ray(**options: Any) -> None:
    sys.exit(REACHED_RAY)


def _run(request: dict[str, Any]) -> None:
    """Run the command of a request in this process, and end it as the interpreter would."""
    from verl.trainer.main_ppo import main as command

    output = os.open(request["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    os.chdir(request["folder"])
    sys.argv = ["main_ppo.py", *request["words"]]
    code: Any = 0
    try:
        command()
    except SystemExit as stop:
        code = stop.code
    loaded = [name for name in HEAVY if name in sys.modules]
    if loaded:
        sys.stderr.write(f"the launching process has imported {loaded}\n")
        code = REACHED_RAY
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


if __name__ == "__main__":
    main()
