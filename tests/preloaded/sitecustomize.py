"""Hand a starting Ray worker over to the server of ``server.py``, which forks a process that has the imports already.

Python imports this module before anything else in every process that has this folder on its ``PYTHONPATH``. It does
nothing unless the process is about to become a Ray worker, in the plain way and with the same Python.
"""

import json
import os
import sys


def _request() -> dict[str, object] | None:
    """Return what the server needs to start the worker that this process would become; None if it is not one."""
    words = sys.orig_argv[1:]
    if len(words) < 2 or not words[0].endswith("/setup_worker.py") or not words[1].endswith("/default_worker.py"):
        return None
    prefix = "--serialized-runtime-env-context="
    contexts = [json.loads(word.removeprefix(prefix)) for word in words if word.startswith(prefix)]
    context = contexts[0] if contexts else {}
    if context.get("command_prefix") or context.get("override_worker_entrypoint"):
        return None  # a profiler or a container starts it
    if context.get("py_executable", sys.executable) != sys.executable or "--language=PYTHON" not in words:
        return None
    rest = [word for word in words[1:] if not word.startswith((prefix, "--language="))]
    return {"words": rest, "env_vars": context.get("env_vars") or {}}


def _hand_over(address: str) -> None:
    request = _request()
    if request is None:
        return
    import ctypes
    import signal
    import socket

    # This process waits outside Python's control, so the kernel ends it with the raylet that started it.
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    with socket.socket(socket.AF_UNIX) as server:
        server.connect(address)
        message = json.dumps(request | {"environment": dict(os.environ), "folder": os.getcwd()}).encode()
        socket.send_fds(server, [len(message).to_bytes(8, "little")], [0, 1, 2])
        server.sendall(message)
        server.recv(1)  # returns when the worker has ended; the server ends the worker if this process dies first
    os._exit(0)


if os.environ.get("VERL_TEST_PRELOADED"):
    _hand_over(os.environ["VERL_TEST_PRELOADED"])
