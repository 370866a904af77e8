"""A small service that runs code, with the HTTP interface of SandboxFusion.

    python examples/tutorial/agent_loop_get_started/sandbox.py --port 8080

It answers POST requests at any path and runs Python in verl's sandbox. It is meant for experiments on one machine: it
listens on 127.0.0.1 only, and starts a process for each request without a limit on their number.
"""

import argparse
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any, Self

from verl.errors import SandboxError
from verl.utils.sandbox import Test, isolation_problem, run_tests

HOST = "127.0.0.1"
MOST_BYTES = 1 << 20
_STATUS = {"ok": "Finished", "timeout": "TimeLimitExceeded"}


def run_code(request: dict[str, Any]) -> dict[str, Any]:
    """Run the request's ``code`` in the sandbox and return the reply of the service."""
    if request.get("language", "python") != "python":
        return {"status": "SandboxError", "message": "this sandbox runs python only", "run_result": None}
    test = Test(stdin=request.get("stdin") or "")
    timeout_s = float(request.get("run_timeout", 10))
    memory_mb = int(request.get("memory_limit_MB", 1024))
    try:
        (run,) = run_tests(str(request["code"]), [test], timeout_s=timeout_s, memory_limit_mb=memory_mb)
    except SandboxError as error:
        return {"status": "SandboxError", "message": str(error), "run_result": None}
    result = {
        "status": _STATUS.get(run.status, "Error"),
        "return_code": run.code,
        "stdout": run.stdout,
        "stderr": run.stderr,
        "execution_time": run.seconds,
    }
    return {"status": "Success" if run.status == "ok" else "Failed", "message": "", "run_result": result}


class _Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        size = int(self.headers.get("Content-Length") or 0)
        try:
            request = json.loads(self.rfile.read(size)) if size <= MOST_BYTES else {}
            reply = run_code(request)
            status = 200
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            reply = {"status": "SandboxError", "message": f"the request cannot be read: {error!r}"}
            status = 400
        body = json.dumps(reply).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


class Sandbox:
    """The service in a thread of this process: ``with Sandbox() as url``."""

    def __init__(self, port: int = 0) -> None:
        self.server = ThreadingHTTPServer((HOST, port), _Handler)
        self.url = f"http://{HOST}:{self.server.server_port}/run_code"

    def __enter__(self) -> str:
        Thread(target=self.server.serve_forever, daemon=True).start()
        return self.url

    def __exit__(self, *error: object) -> None:
        self.server.shutdown()
        self.server.server_close()

    def start(self) -> Self:
        """Serve in a background thread until the process ends."""
        self.__enter__()
        return self


def main() -> int:
    """Serve until the process is stopped; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8080, help="port on 127.0.0.1 (default: 8080)")
    args = parser.parse_args()
    problem = isolation_problem()
    if problem is not None:
        sys.stderr.write(f"error: this machine cannot isolate code: {problem}\n")
        return 2
    sandbox = Sandbox(args.port)
    print(f"running code for {sandbox.url}", flush=True)
    try:
        sandbox.server.serve_forever()
    except KeyboardInterrupt:
        pass
    return 0


if __name__ == "__main__":
    sys.exit(main())
