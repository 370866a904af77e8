"""A judge without a model, for machines that cannot run one: an answer is right if it equals the reference.

    python3 -m recipe.deepeyes.exact_judge --port 18901

It is an OpenAI-compatible server on 127.0.0.1 that understands the judge's prompt of ``deepeyes.py``.
"""

import argparse
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

NAME = "exact"


def verdict(prompt: str) -> str:
    """Return the reply to the recipe's prompt for the judge."""
    found = re.search(r"^Reference: (.*?)\nAnswer: (.*?)\n\nReply with", prompt, re.DOTALL | re.MULTILINE)
    if found is None:
        return "The prompt has no reference and answer."
    reference, answer = (text.strip().lower() for text in found.groups())
    return "CORRECT" if answer == reference else "WRONG"


class Handler(BaseHTTPRequestHandler):
    """Handles ``/v1/models`` and ``/v1/chat/completions``."""

    def do_GET(self) -> None:
        """List the only model."""
        self._send({"object": "list", "data": [{"id": NAME, "object": "model"}]})

    def do_POST(self) -> None:
        """Judge the prompt in the last message."""
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        reply = {"role": "assistant", "content": verdict(request["messages"][-1]["content"])}
        choice = {"index": 0, "message": reply, "finish_reason": "stop"}
        self._send({"object": "chat.completion", "model": NAME, "choices": [choice]})

    def log_message(self, *args: Any) -> None:
        """Do not log requests."""

    def _send(self, body: Any) -> None:
        content = json.dumps(body).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


class Server(ThreadingHTTPServer):
    """An HTTP server whose listen queue holds the requests of a step.

    A client that finds the queue full would try again only after one second, then after three.
    """

    request_queue_size = 1024


def main() -> int:
    """Serve until the process is stopped."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=18901, help="port (default: 18901); 0 takes a free one")
    args = parser.parse_args()
    with Server(("127.0.0.1", args.port), Handler) as server:
        sys.stdout.write(f"http://127.0.0.1:{server.server_address[1]}/v1\n")
        sys.stdout.flush()
        server.serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main())
