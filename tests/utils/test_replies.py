"""Replies of services that are no replies: each service has one error for them, and loses no other reply."""

import asyncio
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.http_service import service
from verl.tools import sandbox_fusion_tools
from verl.tools.search_tool import RetrievalError, SearchTool, _as_read, _documents
from verl.utils.chat_endpoint import ChatEndpoint, EndpointError
from verl.utils.http_client import NoReply, post_json, url_problem
from verl.utils.reward_score import code_tests, sandbox_fusion
from verl.utils.sandbox import remote
from verl.utils.sandbox.remote import RemoteSandboxError, run_remotely, run_remotely_async

DEEP = 100_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@contextmanager
def replying(*replies: bytes) -> Iterator[str]:
    """Answer each connection, after its request, with the next bytes, the last one again and again."""
    left = list(replies)

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:  # closed
                return
            with connection:
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(1 << 16)
                head, _, body = request.partition(b"\r\n\r\n")
                length = re.search(rb"(?i)content-length: *(\d+)", head)
                while length and len(body) < int(length[1]):
                    body += connection.recv(1 << 16)
                connection.sendall(left.pop(0) if len(left) > 1 else left[0])

    listener = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


def http(body: bytes, head: str = "HTTP/1.1 200 OK") -> bytes:
    return f"{head}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n".encode() + body


DEEP_BODIES = [b"[" * DEEP, b"[" * DEEP + b"]" * DEEP, b'{"result":' * DEEP, b'{"choices":[' * DEEP + b"]}" * DEEP]
RAW = {
    "nothing": b"",
    "a broken status line": b"HTTP/1.1 abc OK\r\n\r\n",
    "a status of four digits": b"HTTP/1.1 2000 OK\r\n\r\n",
    "no HTTP": b"SSH-2.0-OpenSSH_9\r\n\r\n",
    "binary": bytes(range(128, 256)) * 4,
    "another version": b"HTTP/9.9 200 OK\r\n\r\n{}",
    "a long header": b"HTTP/1.1 200 OK\r\nA: " + b"a" * 70_000 + b"\r\n\r\n{}",
    "many headers": b"HTTP/1.1 200 OK\r\n" + b"A: a\r\n" * 10_000 + b"\r\n{}",
    "a header without a colon": b"HTTP/1.1 200 OK\r\nabc\r\n\r\n{}",
    "a length that is no number": b"HTTP/1.1 200 OK\r\nContent-Length: abc\r\n\r\n{}",
    "a negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -5\r\n\r\n{}",
    "a length that is too large": b"HTTP/1.1 200 OK\r\nContent-Length: 500\r\n\r\n{}",
    "chunks without a size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    "chunks that end early": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n64\r\n{}",
    "no gzip": b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: 2\r\n\r\n{}",
    "an empty body": http(b""),
    "text": http(b"hello"),
    "no UTF-8": http(b"\xff\xfe{}"),
    "a number": http(b"3"),
    "null": http(b"null"),
    "an empty object": http(b"{}"),
    "a list": http(b"[]"),
    **{f"deep {at}": http(body) for at, body in enumerate(DEEP_BODIES)},
    "not found": http(b"{}", "HTTP/1.1 404 Not Found"),
    "moved": http(b"{}", "HTTP/1.1 307 Temporary Redirect\r\nLocation: http://192.0.2.1/"),
    "moved to no address": http(b"{}", "HTTP/1.1 308 Permanent Redirect\r\nLocation: http://[::1"),
}


def search(url: str) -> Any:
    tool = SearchTool({"retrieval_service_url": url, "max_attempts": 1, "enable_global_rate_limit": False})
    return asyncio.run(tool._retrieve(["a"]))


def endpoint(url: str) -> ChatEndpoint:
    return ChatEndpoint(url, "m", max_attempts=1, retry_delay_s=0.0, timeout_s=60.0)


def ask(url: str) -> Any:
    (answer,) = endpoint(url).ask_all([[{"role": "user", "content": "a"}]])
    if isinstance(answer, EndpointError):
        raise answer
    return answer


SERVICES: dict[str, tuple[Callable[[str], Any], type[Exception]]] = {
    "search": (search, RetrievalError),
    "sandbox": (lambda url: run_remotely(url, "1"), RemoteSandboxError),
    "asynchronous sandbox": (lambda url: asyncio.run(run_remotely_async(url, "1")), RemoteSandboxError),
    "judge": (ask, EndpointError),
    "user": (lambda url: asyncio.run(endpoint(url).answer([{"role": "user", "content": "a"}])), EndpointError),
}


@pytest.mark.parametrize("name", SERVICES)
@pytest.mark.parametrize("case", RAW)
def test_what_is_no_reply_is_the_error_of_the_service(case: str, name: str) -> None:
    call, error = SERVICES[name]
    with replying(RAW[case]) as url, pytest.raises(error, match=url):
        call(url)


@pytest.mark.parametrize("bad", RAW)
def test_one_bad_reply_leaves_the_others(bad: str) -> None:
    good = http(json.dumps({"choices": [{"message": {"content": "yes"}}]}).encode())
    with replying(RAW[bad], good) as url:
        one_by_one = ChatEndpoint(url, "m", max_attempts=1, retry_delay_s=0.0, timeout_s=60.0, max_concurrency=1)
        answers = one_by_one.ask_all([[{"role": "user", "content": text}] for text in "abc"])
    assert isinstance(answers[0], EndpointError) and answers[1:] == ["yes", "yes"]


@pytest.mark.parametrize("status", [301, 302, 303, 307, 308])
def test_no_redirect_takes_the_content_elsewhere(status: int) -> None:
    with service(lambda request: (200, {"status": "Success", "result": [[]]})) as other:
        moved = http(b"{}", f"HTTP/1.1 {status} Moved\r\nLocation: {other.url}/stolen")
        for call, error in SERVICES.values():
            with replying(moved) as url, pytest.raises(error):
                call(url)
    assert not other.requests and not other.paths


def test_a_redirect_within_the_service_is_followed() -> None:
    moved = http(b"", "HTTP/1.1 307 Moved\r\nLocation: /search/")
    with replying(moved, http(b'{"a": 1}')) as url:
        assert asyncio.run(post_json(f"{url}/search", {"q": 1}, 60.0)).text == '{"a": 1}'
    with replying(moved) as url, pytest.raises(NoReply, match="more than 5 redirects"):
        asyncio.run(post_json(url, {}, 60.0))


@pytest.mark.parametrize("url", ["http://[::1", "http://a:99999", "http://a:x", "http://a:0", "http://:80", "//a"])
def test_addresses_that_cannot_be_read_are_named(url: str) -> None:
    assert url_problem(url) is not None


@settings(max_examples=200, deadline=None)
@given(value=VALUES, message=VALUES)
def test_generated_completions_are_texts_or_errors(value: Any, message: Any) -> None:
    for reply in (value, {"choices": value}, {"choices": [value]}, {"choices": [{"message": message}]}):
        try:
            text = endpoint("http://127.0.0.1")._content(200, None, json.dumps(reply).encode())
            assert isinstance(text, str)
        except Exception as error:
            assert type(error).__name__ == "_Retry"


@settings(max_examples=200, deadline=None)
@given(value=VALUES, document=VALUES)
def test_generated_documents_are_read_or_an_error(value: Any, document: Any) -> None:
    for reply in (value, {"result": value}, {"result": [value]}, {"result": [[document, {"document": document}]]}):
        try:
            found = _documents("http://127.0.0.1", json.dumps(reply), 1)
        except RetrievalError:
            continue
        assert all(isinstance(_as_read(documents), str) for documents in found)


@settings(max_examples=200, deadline=None)
@given(part=VALUES, status=VALUES | st.just("Success"), field=st.sampled_from(sorted(remote._FIELDS)), value=VALUES)
def test_generated_results_are_read_or_an_error(part: Any, status: Any, field: str, value: Any) -> None:
    cases = code_tests.read_test_cases({"inputs": ["1"], "outputs": ["1"]})
    for run in (part, {"status": "Finished", field: value}):
        for name in ("run_result", "compile_result"):
            try:
                reply = remote._result(json.dumps({"status": status, name: run, "message": part}).encode())
            except ValueError:
                continue
            sandbox_fusion.judge(cases, 0, reply, "mark")
            try:
                sandbox_fusion_tools._ran_there(reply, 1.0)
            except RemoteSandboxError as error:
                assert str(error)
