"""A sandbox service with SandboxFusion's HTTP interface that isolates a script, which may start processes."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from verl.utils.sandbox import isolation, remote
from verl.utils.sandbox.clock import Clock, descendants

_ISOLATION = isolation.__file__
_START = """
import os, sys
sys.path.insert(0, os.path.dirname(sys.argv[1]))
import isolation
sys.path.pop(0)
if int(sys.argv[3]) > 1:
    del isolation._NUMBERS["fork"]
    isolation._CLONE = (1 << 20, 1 << 20)  # no system call: clone is allowed with all its flags
isolation.isolate(os.path.dirname(sys.argv[2]))
sys.argv = [sys.argv[2]]
exec(compile(open(sys.argv[0]).read(), sys.argv[0], "exec"), {"__name__": "__main__", "__file__": sys.argv[0]})
"""


def run_script(code: str, stdin: str, timeout_s: float, most_processes: int) -> dict[str, Any]:
    """Run a script in a folder for itself, without network and without the files of this machine.

    Its time is counted as in the local sandbox: a busy machine takes none of it.
    """
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "script.py")
        script.write_text(code, encoding="utf-8", errors="surrogatepass")
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", _START, _ISOLATION, str(script), str(most_processes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env={"TMPDIR": folder},
            start_new_session=True,
        )
        used = Clock(timeout_s, lambda: [process.pid, *descendants(process.pid)])
        given: bytes | None = stdin.encode(errors="surrogatepass")
        status, stdout, stderr = "TimeLimitExceeded", b"", b""
        try:
            while used.look() is None:
                with suppress(subprocess.TimeoutExpired):
                    stdout, stderr = process.communicate(given, timeout=0.1)
                    status = "Finished" if process.returncode == 0 else "Error"
                    break
                given = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    return {
        "status": status,
        "execution_time": used.counted_s,
        "return_code": process.returncode,
        "stdout": stdout.decode(errors="replace"),
        "stderr": stderr.decode(errors="replace"),
    }


class SandboxService(ThreadingHTTPServer):
    """Answers ``POST /run_code``; ``failures`` holds HTTP statuses with which the next requests fail."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_port}/run_code"
        self.requests: list[dict[str, Any]] = []
        self.failures: list[int] = []
        self.delay_s = 0.0
        self.at_once = self.most_at_once = 0
        self.lock = threading.Lock()
        self.most_processes = 2

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that no longer wait."""

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a program and reply like the service."""
        with self.lock:
            self.requests.append(request)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.delay_s)
        result = run_script(request["code"], request["stdin"] or "", request["run_timeout"], self.most_processes)
        with self.lock:
            self.at_once -= 1
        status = "Success" if result["return_code"] == 0 else "Failed"
        return {"status": status, "message": "", "compile_result": None, "run_result": result}


class _Handler(BaseHTTPRequestHandler):
    server: SandboxService

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        failure = self.server.failures.pop(0) if self.server.failures else None
        if failure is not None:
            self.send_error(failure)
            return
        content = json.dumps(self.server.run(request)).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxService]:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the permits of its address lie
    monkeypatch.setattr(remote, "MARGIN_S", 600.0)  # its clock counts, not that of a busy machine
    with SandboxService() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(timeout=10)
