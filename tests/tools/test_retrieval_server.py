"""Requests to the retrieval server that cost more than they should, or that nobody should send."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest
from aiohttp.test_utils import TestClient, TestServer
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.tools import retrieval_server
from verl.tools.retrieval_index import BM25Index, Document
from verl.tools.retrieval_server import RequestRefused, Retriever, serve
from verl.tools.search_tool import RetrievalError, SearchTool
from verl.utils.http_client import post_json

DOCUMENTS = [Document(str(at), f"Town {at}\nTown {at} has a river and a bridge. é") for at in range(20)]
DEEP = 100_000


def retriever(key: str | None = None) -> Retriever:
    return Retriever(DOCUMENTS, BM25Index(DOCUMENTS), 3, key)


def served(of: Retriever, ask: Callable[[str], Awaitable[Any]]) -> Any:
    """Return what a client gets that asks a server in this process."""

    async def run() -> Any:
        async with TestClient(TestServer(of.application())) as client:
            return await ask(str(client.make_url("/retrieve")))

    return asyncio.run(run())


BAD: dict[str, bytes] = {
    "nothing": b"",
    "no JSON": b"{",
    "no UTF-8": b'{"queries": ["\xff"]}',
    "deep lists": b"[" * DEEP,
    "deep objects": b'{"queries":' * DEEP + b"1" + b"}" * DEEP,
    "a list": b"[]",
    "a text": b'"a"',
    "no queries": b"{}",
    "queries that are a text": b'{"queries": "a"}',
    "queries that are numbers": b'{"queries": [1]}',
    "many queries": json.dumps({"queries": ["a"] * 1025}).encode(),
    "a long query": json.dumps({"queries": ["a" * 8193]}).encode(),
    "topk as a text": b'{"queries": ["a"], "topk": "3"}',
    "topk as a list": b'{"queries": ["a"], "topk": [3]}',
    "half a topk": b'{"queries": ["a"], "topk": 0.5}',
    "a negative topk": b'{"queries": ["a"], "topk": -1}',
    "an endless topk": b'{"queries": ["a"], "topk": Infinity}',
    "a large topk": b'{"queries": ["a"], "topk": 1001}',
    "many found": json.dumps({"queries": ["a"] * 17, "topk": 1000}).encode(),
}


def test_bad_requests_are_refused_with_status_400() -> None:
    async def ask(url: str) -> dict[str, tuple[int, str]]:
        found = {}
        async with aiohttp.ClientSession() as session:
            for name, body in BAD.items():
                async with session.post(url, data=body) as response:
                    found[name] = response.status, (await response.json())["error"]
        return found

    found = served(retriever(), ask)
    assert {name: status for name, (status, _) in found.items()} == dict.fromkeys(BAD, 400)
    assert all(error for _, error in found.values())


def test_a_small_request_gets_no_large_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrieval_server, "MOST_ANSWER_BYTES", 5_000)
    asked = json.dumps({"queries": ["river"] * 8, "topk": 20}).encode()
    with pytest.raises(RequestRefused, match=r"the answer would have \d+ bytes, more than 5000"):
        retriever().answer(asked)
    assert retriever().answer(json.dumps({"queries": ["river"], "topk": 20}).encode())


@pytest.mark.parametrize("scores", [False, True])
def test_answers_are_those_of_the_index(scores: bool) -> None:
    queries = ["town 3", "bridge", "nothing"]
    index = BM25Index(DOCUMENTS)
    found = index.search(queries, 4)
    wanted = [
        [
            {"document": DOCUMENTS[hit.place]._asdict(), "score": hit.score}
            if scores
            else DOCUMENTS[hit.place]._asdict()
            for hit in hits
        ]
        for hits in found
    ]
    body = json.dumps({"queries": queries, "topk": 4, "return_scores": scores}).encode()
    assert json.loads(retriever().answer(body)) == {"result": wanted}


@settings(max_examples=200, deadline=None)
@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["queries", "topk"]), inner),
        max_leaves=8,
    ),
    queries=st.lists(st.text(max_size=9), max_size=3),
)
def test_generated_requests_are_answered_or_refused(value: Any, queries: list[str]) -> None:
    for request in (value, {"queries": value}, {"queries": queries, "topk": value}):
        try:
            answer = json.loads(RETRIEVER.answer(json.dumps(request).encode()))
        except RequestRefused as error:
            assert str(error)
        else:
            assert len(answer["result"]) == len(request["queries"])


RETRIEVER = retriever()


def test_a_server_with_a_key_wants_it() -> None:
    async def ask(url: str) -> list[int]:
        headers: list[dict[str, str]] = [{}, {"Authorization": "Bearer k"}, {"Authorization": "key é"}]
        headers.append({"Authorization": "Bearer key é"})
        return [(await post_json(url, {"queries": ["river"]}, 60.0, each)).status for each in headers]

    assert served(retriever("key é"), ask) == [401, 401, 200, 200]


def test_the_tool_sends_its_key() -> None:
    def tool(url: str, key: str | None) -> SearchTool:
        return SearchTool({"retrieval_service_url": url, "api_key": key, "max_attempts": 1})

    async def ask(url: str) -> int:
        with pytest.raises(RetrievalError, match="HTTP status 401"):
            await tool(url, None)._retrieve(["river"])
        return len((await tool(url, "secret")._retrieve(["river"]))[0])

    assert served(retriever("secret"), ask) == 3


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.0.2.1"])
def test_other_machines_need_a_key(
    host: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["server", "--corpus", "gone.jsonl", "--host", host])
    assert retrieval_server.main() == 2
    assert "other machines can ask there: give --key" in capsys.readouterr().err


def test_connections_that_send_nothing_are_shut(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(retrieval_server, "READ_TIMEOUT_S", 0.3)

    async def run() -> list[bytes]:
        server = asyncio.create_task(serve(retriever(), "127.0.0.1", 0))
        address = ""
        while not address:
            await asyncio.sleep(0.01)
            address = capsys.readouterr().out
        port = int(address.rsplit(":", 1)[1].partition("/")[0])
        head = b"POST /retrieve HTTP/1.1\r\nHost: a\r\nContent-Length: 50\r\n\r\n"
        openings = [b"", b"POST", b"POST /retrieve HTTP/1.1\r\nHost: a\r\n", head, head + b'{"queries"']

        async def reply_to(opening: bytes) -> bytes:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(opening)
            reply = await reader.read()  # until the server closes it, ten seconds after its reply to half a body
            writer.close()
            return reply

        replies = await asyncio.gather(*map(reply_to, openings))
        server.cancel()
        return replies

    silent = asyncio.run(run())
    assert silent[:3] == [b"", b"", b""]
    assert all(b"408" in reply.split(b"\r\n")[0] for reply in silent[3:])
