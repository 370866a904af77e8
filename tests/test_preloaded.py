"""The process that Ray workers of the tests fork from: see ``tests/preloaded``."""

import json
import os
import socket
from importlib.metadata import version
from pathlib import Path


def connect(variables: dict[str, str], request: bytes, promised: int) -> socket.socket:
    """Send a request as ``sitecustomize`` does; ``promised`` is the length that it announces."""
    client = socket.socket(socket.AF_UNIX)
    client.settimeout(60)
    client.connect(variables["VERL_TEST_PRELOADED"])
    socket.send_fds(client, [promised.to_bytes(8, "little")], [0, 1, 2])
    if request:  # the server closes a connection that promises nothing, and even an empty write then fails
        client.sendall(request)
    return client


def test_a_process_that_dies_in_its_request_does_not_stop_the_server(
    preloaded_workers: dict[str, str], tmp_path: Path
) -> None:
    script = tmp_path / "worker.py"
    script.write_text("import pathlib, sys, torch\npathlib.Path(sys.argv[1]).write_text(torch.__version__)\n")
    request = {"words": [str(script), str(tmp_path / "out")], "env_vars": {}, "environment": dict(os.environ)}
    message = json.dumps(request | {"folder": str(tmp_path)}).encode()
    connect(preloaded_workers, message[:100], len(message)).close()
    connect(preloaded_workers, b"", 0).close()
    with connect(preloaded_workers, message, len(message)) as client:
        assert client.recv(1) == b""  # the worker has ended
    assert (tmp_path / "out").read_text() == version("torch")
