"""A server with the interface of chat completions, whose answers are as good, slow or wrong as a test asks for."""

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Judge:
    """``answer`` gets the text of the last message and the number of times it was seen, and returns the verdict's text,
    or calls a method of the handler and returns None."""

    def __init__(self, answer: Callable[["Handler", str, int], str | None]) -> None:
        self.answer = answer
        self.seen: dict[str, int] = {}
        self.requests: list[dict[str, Any]] = []
        self.paths: set[str] = set()
        self.keys: set[str | None] = set()
        self.active = self.most_active = 0
        self.lock = threading.Lock()
        self.closing = threading.Event()

    def __enter__(self) -> "Judge":
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Bound", (Handler,), {"judge": self}))
        self.server.daemon_threads = True
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02})
        self.thread.start()
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        self.closing.set()
        self.server.shutdown()
        self.server.server_close()
        self.thread.join()


class Handler(BaseHTTPRequestHandler):
    judge: Judge

    def do_POST(self) -> None:
        judge = self.judge
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = request["messages"][-1]["content"]
        with judge.lock:
            judge.paths.add(self.path)
            judge.keys.add(self.headers["Authorization"])
            judge.requests.append(request)
            judge.seen[text] = times = judge.seen.get(text, 0) + 1
            judge.active += 1
            judge.most_active = max(judge.most_active, judge.active)
        try:
            try:
                reply = judge.answer(self, text, times)
            finally:  # before the client has the answer, since it then asks again
                with judge.lock:
                    judge.active -= 1
            if reply is not None:
                self.send(200, {"choices": [{"message": {"role": "assistant", "content": reply}}]})
        except (BrokenPipeError, ConnectionResetError):
            pass  # the client has given up

    def send(self, status: int, body: Any, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def trickle(self) -> None:
        """Send a byte at a time until the server closes, so that no single read takes long."""
        self.send_response(200)
        self.end_headers()
        while not self.judge.closing.wait(0.05):
            self.wfile.write(b" ")
            self.wfile.flush()

    def log_message(self, *args: Any) -> None:
        pass
