"""Serve a rule-based user and judge for the task of ``make_task.py``, as an OpenAI chat-completions API.

    python -m recipe.collabllm.tiny.people --port 8018

The user says the name when asked, and ends the conversation at any other message. The judge checks whether the last
message of the assistant is the right answer, and whether the assistant has asked. In a real run a model on a server
(``vllm serve``) plays both.
"""

import argparse
import json
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from verl.interactions.simulated_user_interaction import END_OF_CHAT

from .make_task import ASKS

Messages = list[dict[str, str]]


def answer(messages: Messages) -> str:
    """Answer as the user if the request starts with a system message, which describes the role, else as the judge."""
    return user(messages) if messages[0]["role"] == "system" else verdict(messages[-1]["content"])


def user(messages: Messages) -> str:
    """Return the user's next message; in this request the assistant's messages have the role ``user``."""
    (name,) = re.findall(r"^write (\w+)$", messages[0]["content"], flags=re.MULTILINE)
    asked = messages[-1]["content"] == ASKS and sum(each["role"] == "assistant" for each in messages) == 1
    return name if asked else END_OF_CHAT


def verdict(question: str) -> str:
    """Return the judge's verdict for a metric, which is recognized by its prompt."""
    conversation = question.rpartition("[Conversation]\n")[2]
    said = [text for role, text in re.findall(r"\[(\w+)\]\n(.*)", conversation) if role == "assistant"]
    if "[Right answer]" not in question:
        return json.dumps({"interactivity": 3 if ASKS in said else 1})
    (right,) = re.findall(r"\[Right answer\]\n(.*)", question)
    return json.dumps({"accuracy": int(said[-1] == right)})


class Handler(BaseHTTPRequestHandler):
    """Handles ``POST /v1/chat/completions``."""

    def do_POST(self) -> None:
        """Answer one request."""
        request: dict[str, Any] = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        message = {"role": "assistant", "content": answer(request["messages"])}
        body = json.dumps({"choices": [{"message": message}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests."""


class Server(ThreadingHTTPServer):
    """An HTTP server whose listen queue holds the requests of a whole step."""

    request_queue_size = 1024
    daemon_threads = True


def main() -> int:
    """Serve until the process ends; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=8018, help="port to listen on (default: 8018)")
    args = parser.parse_args()
    try:
        with Server(("127.0.0.1", args.port), Handler) as server:
            server.serve_forever()
    except KeyboardInterrupt:
        return 0
    except OSError as error:
        sys.stderr.write(f"error: --port={args.port}: {error}: give another port\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
