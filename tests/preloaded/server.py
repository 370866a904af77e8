"""Fork Ray workers from one process that has imported what all of them import, which takes each of them ten seconds.

Only packages whose import changes nothing outside themselves are imported here, and no verl: a worker imports its own
modules, vLLM, Ray and Megatron-Core as always. Run as ``python server.py SOCKET``; it ends when its input ends.
"""

import contextlib
import gc
import importlib
import json
import os
import random
import runpy
import selectors
import signal
import socket
import sys
import threading
from pathlib import Path

MODULES = (
    "torch._dynamo.convert_frame",
    "torch._inductor.lowering",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torchvision",
    "torchdata.stateful_dataloader",
    "transformers.masking_utils",
    "transformers.modeling_utils",
    "transformers.models.qwen2.modeling_qwen2",
    "tensordict",
    "peft",
    "hydra",
    "matplotlib.figure",
    "pydantic.json_schema",
    "openai.types.responses",
    "fastapi",
    "av",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "xgrammar",
    "zmq",
)
"""What takes long to import and starts no thread, as pyarrow and cv2 do: a fork has the first thread only."""
POLL_S = 0.1
REQUEST_TIMEOUT_S = 30


class Workers:
    """The workers that live, each with the connection to the process that asked for it."""

    def __init__(self, listener: socket.socket) -> None:
        self.listener = listener
        self.connections: dict[int, socket.socket] = {}

    def start(self) -> None:
        """Fork the worker that a connection asks for."""
        connection, _ = self.listener.accept()
        connection.settimeout(REQUEST_TIMEOUT_S)
        streams: list[int] = []
        length = 0
        message = b""
        with contextlib.suppress(TimeoutError, ConnectionError), connection.makefile("rb") as file:
            size, streams, _, _ = socket.recv_fds(connection, 8, 3)
            length = int.from_bytes(size, "little")
            message = file.read(length)
        if not message or len(message) < length:  # the process that asked has died, or does not go on
            for stream in streams:
                os.close(stream)
            connection.close()
            return
        connection.settimeout(None)
        pid = os.fork()
        if not pid:
            _become_worker(json.loads(message), streams)
        for stream in streams:
            os.close(stream)
        self.connections[pid] = connection

    def reap(self) -> None:
        """Tell the processes that asked that their workers have ended; end the workers whose process has died."""
        with contextlib.suppress(ChildProcessError):
            while pid := os.waitpid(-1, os.WNOHANG)[0]:
                self.connections.pop(pid).close()
        for pid, connection in self.connections.items():
            with contextlib.suppress(BlockingIOError):
                if not connection.recv(1, socket.MSG_DONTWAIT):
                    os.kill(pid, signal.SIGKILL)


def serve(address: str) -> None:
    """Start workers until the standard input ends."""
    gc.disable()
    for name in MODULES:
        importlib.import_module(name)
    assert threading.active_count() == 1 == len(os.listdir("/proc/self/task")), "an import has started a thread"
    gc.collect()
    gc.freeze()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    workers = Workers(listener)
    with selectors.DefaultSelector() as selector:
        selector.register(listener, selectors.EVENT_READ, workers.start)
        selector.register(sys.stdin, selectors.EVENT_READ, sys.exit)
        while True:
            for key, _ in selector.select(POLL_S):
                key.data()
            workers.reap()


def _become_worker(request: dict, streams: list[int]) -> None:
    """Run Ray's worker script as a fresh interpreter would, and end the process."""
    code = 1
    try:
        os.setsid()
        for target, stream in enumerate(streams):
            os.dup2(stream, target)
        os.closerange(3, 256)
        before = os.environ.get("PYTHONPATH", "")
        os.environ.clear()
        os.environ.update(request["environment"])
        os.environ.update({name: os.path.expandvars(value) for name, value in request["env_vars"].items()})
        os.chdir(request["folder"])
        added = [*filter(None, before.split(os.pathsep)), str(Path(__file__).parent)]
        paths = [path for path in sys.path if path not in added]
        sys.argv = request["words"]
        folder = str(Path(sys.argv[0]).parent)
        sys.path[:] = [folder, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *paths]
        random.seed()
        sys.modules["numpy"].random.seed()
        gc.enable()  # what is imported stays frozen: a collection would go through it, and copy its memory
        runpy.run_path(sys.argv[0], run_name="__main__")
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:  # as an interpreter does at its top: print it, and end with code 1
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])
