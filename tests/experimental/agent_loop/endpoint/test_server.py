"""The HTTP server: keys, hostile requests, clients that go away, and requests without a trajectory."""

import asyncio
import json
import re
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import pytest

from tests.experimental.agent_loop.token_server import TokenServer
from verl.experimental.agent_loop.endpoint import Endpoint, Session, requests
from verl.experimental.agent_loop.endpoint.requests import parse_chat
from verl.experimental.agent_loop.endpoint.server import Access, Limits

from .agents import SAMPLING, build, ids

HELLO = {"messages": [{"role": "user", "content": "hello"}]}
LIMITS = Limits(body_bytes=20_000, body_s=1.0, answer_s=2.0, messages=50, tools=5)
DEEP = b'{"messages": ' + b"[" * 9000 + b"]" * 9000 + b"}"

Steps = Callable[[aiohttp.ClientSession, Access, Session, TokenServer], Awaitable[None]]


def serve(steps: Steps, says: Callable[[str], str | Exception] = lambda prompt: "hi") -> None:
    """Run the steps of a test with an endpoint that serves one trajectory, and one without a trajectory."""

    async def whole() -> None:
        loop, server = build(says)
        policy: Any = loop._policy
        endpoint = Endpoint(policy=policy, token="sesame", limits=LIMITS)
        await endpoint.start()
        session = Session(policy, SAMPLING)
        try:
            async with aiohttp.ClientSession() as client:
                with endpoint.opened(session) as access:
                    await steps(client, access, session, server)
        finally:
            await endpoint.close()

    asyncio.run(whole())


async def post(client: aiohttp.ClientSession, access: Access, body: Any, **more: Any) -> tuple[int, dict[str, Any]]:
    """Return status and body of an answer to ``body``, which is sent as it is if it is bytes."""
    path = more.pop("path", "/chat/completions")
    headers = {"Authorization": f"Bearer {more.pop('key', access.api_key)}"} | more.pop("headers", {})
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with client.post(f"{access.base_url}{path}", data=data, headers=headers) as response:
        return response.status, await response.json()


def message(**changes: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hello"} | changes]}


REFUSED: list[tuple[Any, str]] = [
    (b"", "the body cannot be read as JSON"),
    (b"\xff\xfe", "the body cannot be read as JSON"),
    (b'{"messages": NaN}', "NaN is no JSON value"),
    (DEEP, r"the body cannot be read as JSON|messages\[0\]"),
    (b"[" + b"1," * 9_000 + b"1]", "the body has more than 5000 values"),
    (b"[]", "the body must be a JSON object, not a list"),
    ({}, "messages=null: must be a list of messages"),
    ({"messages": []}, "messages="),
    ({"messages": ["hello"]}, r"messages\[0\]=.*must be an object with role and content"),
    (message(role="robot"), r"messages\[0\].role=\"robot\": must be one of system, "),
    (message(role=["user"]), r"messages\[0\].role="),
    (message(content=7), r"messages\[0\].content=7: must be a text"),
    (message(content=None), r"messages\[0\].content=null"),
    (message(content="\ud800"), "half a surrogate pair at character 0"),
    (message(content=[{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}]), "takes no images"),
    (message(tool_calls=[{"function": {"name": "f"}}]), "belong to messages of the assistant"),
    (message(role="assistant", tool_calls=[{"function": "f"}]), r"messages\[0\].tool_calls\[0\]"),
    (message(role="assistant", tool_calls={"a": 1}), r"tool_calls=.*must be a list of objects"),
    (HELLO | {"tools": [{"type": "function"}]}, r"tools\[0\]=.*must be"),
    (HELLO | {"tools": "all"}, 'tools="all": must be a list of objects'),
    (HELLO | {"tool_choice": "required"}, 'tool_choice="required": must be auto'),
    (HELLO | {"n": 2}, "n=2: is not supported: leave it out, or write 1"),
    (HELLO | {"n": [1]}, "n=.*is not supported"),
    (HELLO | {"response_format": {"type": "json_object"}}, "response_format=.*is not supported"),
    (HELLO | {"logit_bias": {"7": 1}}, "logit_bias="),
    (HELLO | {"max_tokens": 0}, "max_tokens=0: must be an integer of at least 1"),
    (HELLO | {"max_tokens": "many"}, "max_tokens="),
    (HELLO | {"max_tokens": True}, "max_tokens=true"),
    (HELLO | {"temperature": "hot"}, 'temperature="hot": must be a number from 0 to 100'),
    (HELLO | {"temperature": -1}, "temperature=-1"),
    (HELLO | {"top_p": 2}, "top_p=2"),
    (HELLO | {"seed": 2**70}, "seed="),
    (HELLO | {"stop": [""]}, "stop="),
    (HELLO | {"stop": ["x"] * 100}, "stop has 100 entries: it must have at most 16"),
    (HELLO | {"stop": {"a": 1}}, "stop="),
    (HELLO | {"stream": "yes"}, 'stream="yes": must be true or false'),
    (HELLO | {"stream_options": 5}, "stream_options=5"),
    (HELLO | {"logprobs": 3}, "logprobs=3: must be true or false"),
    ({"messages": HELLO["messages"] * 51}, "messages has 51 entries: it must have at most 50"),
    ({"messages": ["x"] * 51}, "messages has 51 entries"),
    (HELLO | {"tools": [{}] * 6}, "tools has 6 entries: it must have at most 5"),
    (HELLO | {"stop": [7] * 1000}, "stop has 1000 entries"),
    (message(content="x" * 15_000), r"messages\[0\].content has at least \d+ tokens, and a trajectory has room for"),
    (message(content="é" * 3_000), r"messages\[0\].content has at least \d+ tokens"),
    (message(content=[{"type": "text", "text": "x" * 7_000}] * 2), r"messages\[0\].content has at least"),
    (message(content="x" * 100), "the prompt has 103 tokens, and a trajectory starts with at most 64"),
]
REFUSED_COMPLETIONS: list[tuple[Any, str]] = [
    ({}, "prompt=null: must be one text or one list of token ids"),
    ({"prompt": ""}, 'prompt="": must not be empty'),
    ({"prompt": ["a", "b"]}, "send a request for each prompt"),
    ({"prompt": [1.5]}, "prompt="),
    ({"prompt": "a", "logprobs": 5}, "logprobs=5: must be 0 or 1"),
    ({"prompt": "x" * 15_000}, r"prompt has at least \d+ tokens"),
    ({"prompt": "a", "echo": True}, "echo=true: is not supported"),
]


def test_hostile_requests_cost_only_their_sender(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_MOST_COMMAS", 5_000)

    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        for path, cases in (("/chat/completions", REFUSED), ("/completions", REFUSED_COMPLETIONS)):
            for body, expected in cases:
                status, answer = await post(client, access, body, path=path)
                assert status == 400, (body, answer)
                assert re.search(expected, answer["error"]["message"]), (body, answer)
                assert answer["error"]["type"] == "invalid_request_error"
        for more in ({"key": "wrong"}, {"key": "sesame"}, {"key": "\udcff"}, {"headers": {"Authorization": "Basic x"}}):
            status, answer = await post(client, access, HELLO, **more)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
        unknown = Access(access.base_url.replace(session.name, "nobody"), access.api_key)
        status, answer = await post(client, unknown, HELLO)
        assert (status, answer["error"]["code"]) == (404, "unknown_trajectory")
        assert (await post(client, access, b"x" * 30_000))[0] == 413
        assert (await post(client, access, HELLO, path="/embeddings"))[0] == 404
        async with client.get(f"{access.base_url}/chat/completions") as response:
            assert response.status == 405 and "error" in await response.json()
        assert not server.asked and not session.segments
        assert (await post(client, access, HELLO))[0] == 200
        async with client.get(f"{access.base_url.partition('/t/')[0]}/health") as response:
            assert await response.json() == {"status": "ok", "trajectories": 1}

    serve(steps)


def test_a_request_that_does_not_arrive_ends() -> None:
    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        async def slowly() -> Any:
            yield b'{"messages'
            await asyncio.sleep(3600)

        headers = {"Authorization": f"Bearer {access.api_key}"}
        async with client.post(f"{access.base_url}/chat/completions", data=slowly(), headers=headers) as response:
            assert response.status == 408 and "within 1 s" in (await response.json())["error"]["message"]

    serve(steps)


def test_connections_that_send_no_request_are_shut() -> None:
    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        port = int(access.base_url.split(":")[2].partition("/")[0])
        for opening in (b"", b"POST", b"GET /health HTTP/1.1\r\nHost: a\r\n"):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(opening)
            assert await reader.read() == b""  # the server closes it
            writer.close()

    serve(steps)


LONG = [message(content="x" * 15_000), message(content="🙂" * 1_500), {"prompt": "x" * 15_000}]


@pytest.mark.parametrize("body", LONG, ids=range(3))
def test_what_cannot_fit_is_not_encoded(body: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    encoded: list[int] = []

    def counted(usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, text: Any, *args: Any, **options: Any) -> Any:
            encoded.append(len(text))
            return usual(self, text, *args, **options)

        return call

    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        kind = type(session.policy.tokenizer)
        for name in ("__call__", "encode"):
            monkeypatch.setattr(kind, name, counted(getattr(kind, name)))
        path = "/completions" if "prompt" in body else "/chat/completions"
        status, answer = await post(client, access, body, path=path)
        assert status == 400 and answer["error"]["code"] == "context_length_exceeded"
        assert not [size for size in encoded if size > 1_000]

    serve(steps)


def test_an_agent_of_many_turns_is_served() -> None:
    assert len(parse_chat({"messages": [{"role": "user", "content": "a"}] * 4_001}).messages) == 4_001


def test_a_client_that_goes_away_cancels_its_request() -> None:
    """Its trajectory stays as it was, and so the client may ask again."""
    answers = iter(["first", "...", "third", "..."])

    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        assert (await post(client, access, HELLO))[0] == 200
        later = {"messages": [*HELLO["messages"], {"role": "assistant", "content": "first"}, *HELLO["messages"]]}
        given_up = asyncio.create_task(post(client, access, later))
        while len(server.asked) < 2:
            await asyncio.sleep(0.01)
        given_up.cancel()
        while not server.cancelled:
            await asyncio.sleep(0.01)
        status, answer = await post(client, access, later)
        assert status == 200 and answer["choices"][0]["message"]["content"] == "third"
        (segment,) = session.segments
        assert segment.trajectory.response_ids == ids("first<|end|><|user|>hello<|end|><|assistant|>third<|end|>")
        again = await post(client, access, later, headers={"x-stainless-retry-count": "1"})
        assert again == (200, answer) and len(server.asked) == 3  # the client had not seen the answer
        status, answer = await post(client, access, HELLO)  # the server does not answer
        assert status == 504 and "no answer within 2 s" in answer["error"]["message"] and len(server.cancelled) == 2

    serve(steps, lambda prompt: next(answers))


def test_the_end_of_a_trajectory_ends_its_requests() -> None:
    async def whole() -> None:
        loop, server = build(lambda prompt: "...")
        policy: Any = loop._policy
        endpoint = Endpoint()
        await endpoint.start()
        async with aiohttp.ClientSession() as client:
            with endpoint.opened(Session(policy, SAMPLING)) as access:
                waiting = asyncio.create_task(post(client, access, HELLO))
                while not server.asked:
                    await asyncio.sleep(0.01)
            with pytest.raises(aiohttp.ClientError):
                await waiting
            assert len(server.cancelled) == 1
            assert (await post(client, access, HELLO))[0] == 404
        await endpoint.close()

    asyncio.run(whole())


def test_the_end_of_a_trajectory_ends_a_request_that_still_arrives() -> None:
    async def whole() -> None:
        loop, server = build(lambda prompt: "hi")
        policy: Any = loop._policy
        endpoint = Endpoint()
        await endpoint.start()
        began, goes_on = asyncio.Event(), asyncio.Event()

        async def slowly() -> Any:
            yield b'{"messages": '
            began.set()
            await goes_on.wait()
            yield json.dumps(HELLO["messages"]).encode() + b"}"

        session = Session(policy, SAMPLING)
        async with aiohttp.ClientSession() as client:
            with endpoint.opened(session) as access:
                headers = {"Authorization": f"Bearer {access.api_key}"}
                waiting = asyncio.create_task(
                    client.post(f"{access.base_url}/chat/completions", data=slowly(), headers=headers)
                )
                await began.wait()
                while not endpoint._sessions[session.name][2]:  # the request has not reached its handler
                    await asyncio.sleep(0.01)
            goes_on.set()
            with pytest.raises(aiohttp.ClientError):
                await waiting
            assert not server.asked
        await endpoint.close()

    asyncio.run(whole())


def test_requests_without_a_trajectory() -> None:
    """Each is a conversation of its own, which samples as it says."""

    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        open_to_all = Access(access.base_url.replace(f"/t/{session.name}", ""), "sesame")
        for _ in range(2):
            status, answer = await post(client, open_to_all, HELLO | {"temperature": 0.5, "logprobs": True})
            assert status == 200 and answer["choices"][0]["logprobs"]["content"][0]["logprob"] == -0.25
        assert [params["temperature"] for _, _, params in server.asked] == [0.5, 0.5]
        assert (await post(client, open_to_all, HELLO, key="wrong"))[0] == 401
        assert not session.segments

    serve(steps)

    async def closed() -> None:
        endpoint = Endpoint("0.0.0.0", advertised="127.0.0.1")
        await endpoint.start()
        async with aiohttp.ClientSession() as client:
            status, answer = await post(client, Access(f"{endpoint.address}/v1", ""), HELLO)
            assert status == 404 and "need the base URL of a trajectory" in answer["error"]["message"]
            async with client.get(f"{endpoint.address}/health") as response:
                assert response.status == 401
        await endpoint.close()

    asyncio.run(closed())


def test_an_open_server_needs_a_token() -> None:
    async def whole() -> None:
        policy: Any = build(lambda prompt: "hi")[0]._policy
        with pytest.raises(ValueError, match="host=0.0.0.0: other machines can reach the endpoint: give it a token"):
            Endpoint("0.0.0.0", policy=policy)

    asyncio.run(whole())
