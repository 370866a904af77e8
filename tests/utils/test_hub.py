"""A model of the hub on a machine that cannot reach it is refused at once."""

import http.server
import socket
import threading
import time

import pytest
from huggingface_hub import constants

from verl.utils.hub import hub_problems, unreachable


@pytest.fixture
def silent():
    """Return the address of a server that accepts connections and says nothing."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_address_without_an_answer(silent):
    start = time.monotonic()
    assert unreachable(silent, timeout_s=0.3) is not None
    assert "refused" in unreachable("http://127.0.0.1:1", timeout_s=5)
    assert time.monotonic() - start < 5


def test_a_server_that_answers_is_reachable():
    class Teapot(http.server.BaseHTTPRequestHandler):
        def do_HEAD(self):
            self.send_error(418)

        def log_message(self, *_):
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Teapot) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        assert unreachable(f"http://127.0.0.1:{server.server_port}", timeout_s=5) is None
        server.shutdown()


def test_what_is_wrong_with_a_hub_id(tmp_path, monkeypatch):
    assert list(hub_problems(str(tmp_path))) == list(hub_problems("hdfs://models/a")) == []
    (problem,) = hub_problems("not a hub id")
    assert "neither a folder nor a hub id" in problem
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    (problem,) = hub_problems("nobody/nothing")
    assert "HF_HUB_OFFLINE=1" in problem and constants.HF_HUB_CACHE in problem
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    (problem,) = hub_problems("nobody/nothing")
    assert "http://127.0.0.1:1 cannot be reached" in problem and "copy the model to this machine" in problem
