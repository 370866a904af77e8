"""A sandbox service with SandboxFusion's HTTP interface that runs Python in the local sandbox."""

import json
import tempfile
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from verl.utils.sandbox import Test, run_tests

_STATUS = {"ok": "Finished", "timeout": "TimeLimitExceeded"}


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

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that no longer wait."""

    def run(self, request: dict[str, Any]) -> dict[str, Any]:
        """Run a program and reply like the service."""
        with self.lock:
            self.requests.append(request)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        time.sleep(self.delay_s)
        stdin, limits = request["stdin"] or "", {"memory_limit_mb": request["memory_limit_MB"]}
        (run,) = run_tests(request["code"], [Test(stdin)], timeout_s=request["run_timeout"], **limits)
        with self.lock:
            self.at_once -= 1
        result = {"status": _STATUS.get(run.status, "Error"), "execution_time": run.seconds, "return_code": run.code}
        result |= {"stdout": run.stdout, "stderr": run.stderr}
        status = "Success" if run.status == "ok" else "Failed"
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
    with SandboxService() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(timeout=10)
