"""Ask the fork server for a worker process of Ray; without an answer, execute Ray's own command.

``python -I -S client.py FOLDER PYTHON [SETUP_WORKER] DEFAULT_WORKER ARGUMENT...``, where ``FOLDER`` holds the sockets
of the server, and the rest is the command of Ray. It imports little, so that it starts at once.
"""

import json
import os
import resource
import signal
import socket
import sys

_CONTEXT = "--serialized-runtime-env-context="
_LANGUAGE = "--language="
_PATIENCE_S = 45.0  # Ray kills a process that has not reported after 60
_FAILED = b"n"
OF_WORKER = "WG_BACKEND"
"""A variable that only the workers of a worker group have."""
GENERAL = "general"
WORKERS = "workers"
"""Names of the sockets: of a server for all processes, and of one that has also imported what workers need."""


def plain_worker(command: list[str]) -> tuple[list[str], dict[str, str]] | None:
    """Return script and arguments of a worker, and the variables that its runtime environment adds.

    Returns: None if that environment asks for more than variables.
    """
    python, *rest = command
    if not rest or not os.path.basename(rest[0]).startswith("setup_worker"):
        return rest, {}
    contexts = [word for word in rest if word.startswith(_CONTEXT)]
    if len(contexts) != 1 or _LANGUAGE + "PYTHON" not in rest:
        return None
    context = json.loads(contexts[0].removeprefix(_CONTEXT))
    variables = context.pop("env_vars", {})
    if context.pop("py_executable", python) != python or any(context.values()):
        return None
    return [word for word in rest[1:] if not word.startswith((_CONTEXT, _LANGUAGE))], variables


def with_variables(environment: dict[str, str], variables: dict[str, str]) -> dict[str, str] | None:
    """Return the environment as Ray changes it; None if a variable refers to others, which Ray would expand."""
    if any("$" in value for value in variables.values()):
        return None
    return environment | variables


def ask(folder: str, command: list[str]) -> bool:
    """Return whether the server has started the command; it then has this process's standard streams."""
    worker = plain_worker(command)
    if worker is None:
        return False
    words, variables = worker
    environment = with_variables(dict(os.environ), variables)
    if environment is None:
        return False
    is_worker = OF_WORKER in environment and os.path.exists(os.path.join(folder, WORKERS))
    request = {
        "words": words,
        "environment": environment,
        "folder": os.getcwd(),
        "group": os.getpgid(0),
        "parent": os.getppid(),
        "files": resource.getrlimit(resource.RLIMIT_NOFILE),
        "blocked": [int(number) for number in signal.pthread_sigmask(signal.SIG_BLOCK, [])],
    }
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(_PATIENCE_S)
        connection.connect(os.path.join(folder, WORKERS if is_worker else GENERAL))
        content = json.dumps(request).encode()
        socket.send_fds(connection, [len(content).to_bytes(8, "big")], [0, 1, 2])
        connection.sendall(content)
        if connection.recv(1) != b"y":
            return False
        # From here on only the server starts the process: Ray would take a second one for the same worker.
        connection.sendall(b"y")
        connection.settimeout(None)
        return connection.recv(1) != _FAILED  # any other answer: the server has forked, or has ended


def main(folder: str, command: list[str]) -> None:
    """Let the server run the command, or execute it in this process."""
    try:
        is_started = ask(folder, command)
    except (OSError, ValueError):  # no server, or one that has ended: a process may always start by itself
        is_started = False
    if not is_started:
        os.execv(command[0], command)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
