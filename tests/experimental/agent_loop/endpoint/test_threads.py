"""Texts become tokens in threads: the event loop goes on, one thread at a time has a tokenizer, and the order stays."""

import asyncio
import copy
import json
import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from statistics import median
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import pytest

from tests.experimental.agent_loop.token_server import TokenServer
from verl.experimental.agent_loop.endpoint import Endpoint, Session, templates
from verl.experimental.agent_loop.endpoint.requests import parse_chat
from verl.experimental.agent_loop.endpoint.server import Access, Limits
from verl.experimental.agent_loop.endpoint.templates import Templates
from verl.utils.chat import text_tokens
from verl.utils.dataset.token_bounds import count_tokens
from verl.utils.tokenizer import one_thread

from .agents import SAMPLING, TOKENIZER, build
from .test_server import message, post, serve

TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
WAIT = "w" * 3_000
"""A text for which the tokenizer of these tests waits."""


class Held:
    """Lets the tokenizer wait for ``opened`` where a text holds ``WAIT``; ``came`` says that it does."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.monkeypatch = monkeypatch
        self.came, self.opened = threading.Event(), threading.Event()
        kind = type(TOKENIZER)
        monkeypatch.setattr(kind, "__call__", self._held(kind.__call__))
        monkeypatch.setattr(templates, "_LONG", 1_000)

    def unbound(self, session: Session) -> Templates:
        """Let the size of a text say nothing about its tokens."""
        self.monkeypatch.setattr(session.policy.templates, "fewest_tokens", None)
        return session.policy.templates

    def _held(self, usual: Callable[..., Any]) -> Callable[..., Any]:
        def call(tokenizer: Any, text: Any, *args: Any, **options: Any) -> Any:
            if WAIT in text:
                self.came.set()
                self.opened.wait(600)
            return usual(tokenizer, text, *args, **options)

        return call


def test_four_threads_and_two_settings_give_their_own_ids() -> None:
    tokenizer = copy.deepcopy(TOKENIZER)
    texts = ["one two three four five" * count for count in range(1, 6)]
    whole = [text_tokens(tokenizer, text) for text in texts]

    def cut() -> bool:
        for _ in range(400):
            with one_thread(tokenizer):
                if [len(ids) for ids in tokenizer(texts, truncation=True, max_length=3)["input_ids"]] != [3] * 5:
                    return False
        return True

    def uncut() -> bool:
        return all(
            [text_tokens(tokenizer, text) for text in texts] == whole
            and count_tokens(tokenizer, texts) == [len(ids) for ids in whole]
            for _ in range(200)
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(each.result() for each in [pool.submit(work) for work in (cut, uncut, cut, uncut)])


def test_others_are_served_while_a_long_text_is_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        held.unbound(session)
        other = Session(session.policy, SAMPLING)
        long = asyncio.create_task(post(client, access, message(content=WAIT)))
        await asyncio.to_thread(held.came.wait)
        await other.chat(parse_chat(message()))
        assert not long.done()
        held.opened.set()
        status, answer = await long
        assert status == 400 and "the prompt has 3003 tokens" in answer["error"]["message"]

    serve(steps)


def test_the_time_of_a_text_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    held = Held(monkeypatch)

    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        own = held.unbound(session)
        monkeypatch.setattr(own, "_encode_s", 0.1)
        try:
            for _ in range(2):  # the second one waits for the thread of the first one
                status, answer = await post(client, access, message(content=WAIT))
                assert status == 400 and "were not written as tokens within 0.1 s" in answer["error"]["message"]
        finally:
            held.opened.set()
            monkeypatch.setattr(own, "_encode_s", 600.0)
        assert (await post(client, access, message()))[0] == 200

    serve(steps)


def test_requests_keep_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first request is segment 0, with the seed of the run, although its text takes longer."""
    held = Held(monkeypatch)

    async def steps(client: aiohttp.ClientSession, access: Access, session: Session, server: TokenServer) -> None:
        held.unbound(session)
        object.__setattr__(session.policy, "prompt_length", 10_000)
        long = asyncio.create_task(session.chat(parse_chat(message(content=WAIT))))
        await asyncio.to_thread(held.came.wait)
        short = asyncio.create_task(session.chat(parse_chat(message(content="short"))))
        await asyncio.sleep(0)
        held.opened.set()
        assert [(await each).place for each in (long, short)] == [(0, 0), (1, 0)]
        assert server.asked[0][2]["seed"] == SAMPLING["seed"] != server.asked[1][2]["seed"]

    serve(steps)


def test_formats_that_are_kept_have_a_limit() -> None:
    kept = Templates(TOKENIZER, {}, cache_bytes=20_000)
    described = [TOOL | {"function": TOOL["function"] | {"description": f"{at}" * 2_000}} for at in range(9)]  # type: ignore[operator]
    forms = [kept.of([tool]) for tool in described]
    assert kept._formats.currsize <= 20_000 and 2 <= len(kept._formats) < 9
    assert kept.of([described[-1]]) is forms[-1] and kept.of([described[0]]) is not forms[0]
    kept.of([*described] * 4)  # larger than all that may be kept
    assert kept.of([described[-1]]) is forms[-1]
    assert Templates(TOKENIZER, {})._formats.maxsize == 256 * 2**20


def test_the_limits_have_keys() -> None:
    async def made(**arguments: Any) -> tuple[Limits, Templates]:
        loop, _ = build(lambda prompt: "hi", **arguments)
        return loop._limits, loop._policy.templates

    limits, usual = asyncio.run(made())
    assert limits == Limits(32 * 2**20, 60.0, 3600.0, 10_000, 1_024, 16)
    assert usual._formats.maxsize == 256 * 2**20 and usual._encode_s == 60
    keys = {"most_body_mb": 1, "most_messages": 2, "most_tools": 3, "most_stops": 4, "answer_timeout_s": 5.0}
    limits, changed = asyncio.run(made(**keys, most_cache_mb=7, encode_timeout_s=8.0))
    assert limits == Limits(2**20, 60.0, 5.0, 2, 3, 4)
    assert changed._formats.maxsize == 7 * 2**20 and changed._encode_s == 8


# ---- many clients


async def _with_agents(count: int, act: Callable[[int, Session], Any], length: int = 2_000) -> tuple[Any, ...]:
    """Let so many agents act at the same time; return their sessions and what the server was asked."""
    loop, server = build(lambda prompt: f"{len(prompt)} {prompt[-20:]}", prompt_length=length, response_length=length)
    policy: Any = loop._policy
    sessions = [Session(policy, SAMPLING | {"seed": number}) for number in range(count)]
    async with asyncio.TaskGroup() as group:
        for number, session in enumerate(sessions):
            group.create_task(act(number, session))
    return sessions, server.asked


def _tokens(session: Session) -> list[Any]:
    outputs = [(each.number, each.trajectory.output(num_turns=1)) for each in session.segments]
    return [
        (number, row.prompt_ids, row.response_ids, row.response_mask, row.response_logprobs) for number, row in outputs
    ]


@pytest.mark.parametrize("count", [8, pytest.param(200, marks=pytest.mark.full)])
def test_agents_get_equal_answers_whenever_they_ask(count: int) -> None:
    """Tokens, segments and seeds of an agent are those of another run, in which threads and agents took turns."""

    def acting(run: int) -> Callable[[int, Session], Any]:
        async def act(number: int, session: Session) -> None:
            pauses, said = random.Random(run * count + number), [{"role": "user", "content": f"a {number}"}]
            for turn in range(3):
                await asyncio.sleep(pauses.random() / 20)
                answer, _ = await asyncio.gather(
                    session.chat(parse_chat({"messages": said})),
                    session.chat(parse_chat(message(content=f"aside {turn}" * 30))),  # a segment of its own
                )
                said += [answer.message(), {"role": "user", "content": "on" * turn}]

        return act

    (first, asked), (second, asked_again) = (asyncio.run(_with_agents(count, acting(run))) for run in (1, 2))
    assert [_tokens(session) for session in first] == [_tokens(session) for session in second]
    assert all([number for number, *_ in _tokens(session)] == [0, 1, 2, 3] for session in first)
    seeds = [sorted((ids, params["seed"]) for _, ids, params in each) for each in (asked, asked_again)]
    assert seeds[0] == seeds[1]


@pytest.mark.full
def test_an_agent_of_2000_turns_is_one_trajectory() -> None:
    async def act(number: int, session: Session) -> None:
        said: list[dict[str, Any]] = []
        for _ in range(2_000):
            said.append({"role": "user", "content": "a"})
            said.append((await session.chat(parse_chat({"messages": said}))).message())

    (session,), asked = asyncio.run(_with_agents(1, act, length=200_000))
    assert len(asked) == 2_000 and len(session.segments) == 1
    assert len({params["seed"] for _, _, params in asked}) == 2_000
    assert len(session.segments[0].trajectory.turns) == 3_999


def _hostile() -> dict[str, bytes]:
    """Return the requests that cost most, by what is large in them."""
    nested = b'{"messages": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    tools = [TOOL | {"function": {"name": "f", "description": "d" * 400, "parameters": {}}}] * 1_024
    bodies: dict[str, Any] = {
        "text of 4 MB": message(content="a b c " * 700_000),
        "text of 30 MB": message(content="ab " * 10_000_000),
        "200,000 messages": {"messages": message()["messages"] * 200_000},
        "10,000 messages": {"messages": message()["messages"] * 10_000},
        "a million stops": message() | {"stop": ["x"] * 1_000_000},
        "1,024 tools": message() | {"tools": tools},
        "a million tokens": {"prompt": [7] * 1_000_000},
        "ten million tokens": {"prompt": [7] * 10_000_000},
    }
    written = {name: json.dumps(body).encode() for name, body in bodies.items()}
    return written | {"nested JSON": nested, "33 MiB": b"x" * (33 * 2**20), "no JSON": b"[1," * 5_000_000}


def _refusal(access: Access, body: bytes) -> int | None:
    """Return the status of a request; None if the server has shut the connection before the end of its body."""
    url = urlsplit(access.base_url)
    path = "/completions" if body.startswith(b'{"prompt"') else "/chat/completions"
    connection = HTTPConnection(str(url.hostname), url.port)
    try:
        connection.request("POST", url.path + path, body, {"Authorization": f"Bearer {access.api_key}"})
        return connection.getresponse().status
    except OSError:
        return None
    finally:
        connection.close()


@pytest.mark.full
@pytest.mark.parametrize("bound", [True, False], ids=["bound", "unbound"])
def test_small_requests_wait_at_most_a_second_longer(bound: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one client sends what costs most, 199 others ask; medians of three, for an idle machine."""

    async def asked(client: aiohttp.ClientSession, accesses: list[Access], hostile: bytes | None) -> float:
        """Return the seconds of the slowest of the small requests."""

        async def small(access: Access) -> float:
            started = time.monotonic()
            assert (await post(client, access, message()))[0] == 200
            return time.monotonic() - started

        sent = None if hostile is None else asyncio.create_task(asyncio.to_thread(_refusal, accesses[0], hostile))
        slowest = 0.0
        while not slowest or (sent is not None and not sent.done()):
            slowest = max(slowest, *await asyncio.gather(*map(small, accesses[1:])))
        if sent is not None:
            status = await sent
            assert status in (400, 413, None) or not bound  # the template of these tests shows no tools
        return slowest

    async def whole() -> dict[str, float]:
        loop, _ = build(lambda prompt: "hi")
        policy: Any = loop._policy
        if not bound:
            monkeypatch.setattr(policy.templates, "fewest_tokens", None)
            monkeypatch.setattr(policy.templates, "_encode_s", 10.0)  # each long text takes so long
        endpoint = Endpoint(policy=policy, token="sesame")
        await endpoint.start()
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(connector=connector) as client:
            with ExitStack() as stack:
                accesses = [stack.enter_context(endpoint.opened(Session(policy, SAMPLING))) for _ in range(200)]
                alone = median([await asked(client, accesses, None) for _ in range(3)])
                found = {}
                for name, body in _hostile().items():
                    found[name] = median([await asked(client, accesses, body) for _ in range(3)]) - alone
        await endpoint.close()
        return found

    waits = asyncio.run(whole())
    print({name: round(wait, 2) for name, wait in waits.items()})
    assert {name: wait for name, wait in waits.items() if wait > 1.0} == {}
