"""The HTTP server of the endpoint, on the event loop of the process that can reach the rollout servers."""

import asyncio
import hmac
import logging
import secrets
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

from aiohttp import web

from verl.base_config import one_line
from verl.errors import ServerError, WrongInput
from verl.experimental.agent_loop.endpoint.answers import (
    Body,
    chat_body,
    chunks,
    completion_body,
    error_body,
    models_body,
)
from verl.experimental.agent_loop.endpoint.history import Answer
from verl.experimental.agent_loop.endpoint.requests import (
    MOST_MESSAGES,
    MOST_STOPS,
    MOST_TOOLS,
    ChatRequest,
    CompletionRequest,
    RequestError,
    parse_body,
    parse_chat,
    parse_completion,
)
from verl.experimental.agent_loop.endpoint.session import Policy, Session
from verl.utils.concurrency import in_thread
from verl.utils.json_types import JsonObject
from verl.utils.net_utils import LOCAL_HOSTS

logger = logging.getLogger(__name__)

Asked = TypeVar("Asked", ChatRequest, CompletionRequest)

MOST_BODY_BYTES = 32 * 2**20
BODY_TIMEOUT_S = 60.0
"""How long a client may take to send a request."""
_LONG_BODY = 1 << 16
"""The most bytes of a body that is parsed on the event loop."""


@dataclass(frozen=True)
class Limits:
    """Limits on the size and cost of a request.

    Attributes: ``body_bytes``, ``messages``, ``tools`` and ``stops`` of its body; ``body_s`` seconds to send it, and
        ``answer_s`` until the answer.
    """

    body_bytes: int = MOST_BODY_BYTES
    body_s: float = BODY_TIMEOUT_S
    answer_s: float = 3600.0
    messages: int = MOST_MESSAGES
    tools: int = MOST_TOOLS
    stops: int = MOST_STOPS


@dataclass(frozen=True)
class Access:
    """The URL and API key of a trajectory, for a client of the ``openai`` package."""

    base_url: str
    api_key: str


class Endpoint:
    """Serves the OpenAI API to separate agent programs; each trajectory has its own URL and key.

    Args:
        host: the address to listen on; any but a loopback address needs a key for every request.
        port: 0 takes a free one.
        advertised: the address in base URLs if it differs from ``host``, such as the node's address for 0.0.0.0.
        policy: the policy of requests without a trajectory, ``/v1/...``; each request is a separate conversation.
            Without a policy such requests are refused.
        token: the key of these requests, and of ``/health``. Without a token they need no key, and ``host`` must be a
            loopback address.
    """

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        advertised: str | None = None,
        policy: Policy | None = None,
        token: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        if policy is not None and host not in LOCAL_HOSTS and not token:
            raise WrongInput(f"host={host}: other machines can reach the endpoint: give it a token, or host=127.0.0.1")
        self._host = host
        self._port = port
        self._advertised = advertised or host
        self._policy = None if policy is None else replace(policy, client_sampling="apply")  # nothing is trained
        self._token = token
        self._limits = limits or Limits()
        self._sessions: dict[str, tuple[str, Session, set[asyncio.Task[object]]]] = {}
        self._runner: web.AppRunner | None = None

    @property
    def address(self) -> str:
        """The URL of the server, without a path."""
        if self._runner is None:
            raise RuntimeError("the endpoint does not serve yet: call start")
        port = self._runner.addresses[0][1]
        host = f"[{self._advertised}]" if ":" in self._advertised else self._advertised
        return f"http://{host}:{port}"

    async def start(self) -> None:
        """Take requests from now on."""
        app = web.Application(client_max_size=self._limits.body_bytes, middlewares=[_errors])
        app.router.add_get("/health", self._health)
        for prefix in ("", "/t/{trajectory}"):
            app.router.add_get(f"{prefix}/v1/models", self._models)
            app.router.add_post(f"{prefix}/v1/chat/completions", self._chat)
            app.router.add_post(f"{prefix}/v1/completions", self._complete)
        # A client that closes its connection cancels its request, and with it the work of the rollout server.
        # A client that sends no whole request is disconnected; the answer to a whole request may take any time.
        runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=1.0,
            handler_cancellation=True,
            keepalive_timeout=self._limits.body_s,
        )
        await runner.setup()
        await web.TCPSite(runner, self._host, self._port).start()
        self._runner = runner

    async def close(self) -> None:
        """Cancel the open requests, and accept no others."""
        for name in list(self._sessions):
            self._shut(name)
        runner = self._runner
        self._runner = None
        if runner is not None:
            await runner.cleanup()

    @contextmanager
    def opened(self, session: Session) -> Iterator[Access]:
        """Serve a trajectory; afterwards its key is invalid, and its open requests are cancelled."""
        key = secrets.token_urlsafe(32)
        self._sessions[session.name] = (key, session, set())
        try:
            yield Access(f"{self.address}/t/{session.name}/v1", key)
        finally:
            self._shut(session.name)

    def _shut(self, name: str) -> None:
        _, _, tasks = self._sessions.pop(name, ("", None, set()))
        for task in tasks:
            task.cancel()

    # ---- routes

    async def _health(self, request: web.Request) -> web.StreamResponse:
        if self._host not in LOCAL_HOSTS:
            self._check_key(request, [self._token, *(key for key, _, _ in self._sessions.values())])
        return web.json_response({"status": "ok", "trajectories": len(self._sessions)})

    async def _models(self, request: web.Request) -> web.StreamResponse:
        policy = self._session(request).policy
        return web.json_response(models_body(policy.model, policy.prompt_length + policy.response_length))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"  # the openai package sends this header
        with _noted(session), self._underway(session):
            limits = self._limits
            asked = await self._parsed(
                session, request, lambda body: parse_chat(body, limits.messages, limits.tools, limits.stops)
            )
            answer = await self._limited(session.chat(asked, is_retry))
        body = chat_body(answer, asked.options, session.policy.model, session.policy.tokenizer)
        return await _send(request, asked, body)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        session = self._session(request)
        with _noted(session), self._underway(session):
            asked = await self._parsed(session, request, lambda body: parse_completion(body, self._limits.stops))
            answer = await self._limited(session.complete(asked))
        body = completion_body(answer, asked.options, session.policy.model, session.policy.tokenizer)
        return await _send(request, asked, body)

    def _session(self, request: web.Request) -> Session:
        """Return the trajectory of a request.

        Raises: RequestError for an unknown one, or the wrong key.
        """
        name = request.match_info.get("trajectory")
        if name is None:
            if self._policy is None:
                raise RequestError(
                    "requests need the base URL of a trajectory, /t/<trajectory>/v1, as the agent loop gives it",
                    status=404,
                )
            if self._token is not None:
                self._check_key(request, [self._token])
            return Session(self._policy, {"logprobs": False})
        key, session, _ = self._sessions.get(name, (None, None, None))
        if session is None:
            raise RequestError(
                "no such trajectory: it has ended, or the base URL is wrong", status=404, code="unknown_trajectory"
            )
        self._check_key(request, [key])
        return session

    def _check_key(self, request: web.Request, keys: list[str | None]) -> None:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").encode("utf-8", "surrogateescape")
        if not any(key is not None and hmac.compare_digest(given, key.encode()) for key in keys):
            raise RequestError(
                "the API key is missing or wrong: send Authorization: Bearer <key>, with the key of this trajectory",
                status=401,
                code="invalid_api_key",
            )

    async def _parsed(self, session: Session, request: web.Request, parse: Callable[[JsonObject], Asked]) -> Asked:
        """Return the request that a body holds; a thread parses a long one, while later requests wait their turn."""
        body = await self._body(request)
        async with session.order:
            if len(body) <= _LONG_BODY:
                return parse(parse_body(body))
            return await in_thread(lambda: parse(parse_body(body)), "parse a request")

    async def _body(self, request: web.Request) -> bytes:
        too_large = RequestError(f"the body is larger than {self._limits.body_bytes} bytes", status=413)
        if (request.content_length or 0) > self._limits.body_bytes:
            raise too_large
        try:
            async with asyncio.timeout(self._limits.body_s):
                return await request.read()
        except TimeoutError as error:
            raise RequestError(f"the request did not arrive within {self._limits.body_s:g} s", status=408) from error
        except web.HTTPRequestEntityTooLarge as error:
            raise too_large from error

    @contextmanager
    def _underway(self, session: Session) -> Iterator[None]:
        """End the request of this task when its trajectory ends, even while its body is still arriving."""
        tasks = self._sessions.get(session.name, ("", None, set()))[2]
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            yield
        finally:
            tasks.discard(task)

    async def _limited(self, answer: Awaitable[Answer]) -> Answer:
        """Wait for an answer, at most for the time limit."""
        try:
            async with asyncio.timeout(self._limits.answer_s):
                return await answer
        except TimeoutError as error:
            limit = self._limits.answer_s
            raise RequestError(f"the rollout servers gave no answer within {limit:g} s", status=504) from error


@contextmanager
def _noted(session: Session) -> Iterator[None]:
    """Let a trajectory know why a request was refused."""
    try:
        yield
    except RequestError as error:
        session.refused = error
        raise


async def _send(request: web.Request, asked: ChatRequest | CompletionRequest, body: Body) -> web.StreamResponse:
    if not asked.options.stream:
        return web.json_response(body)
    response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
    await response.prepare(request)
    for chunk in chunks(body, asked.options):
        await response.write(chunk)
    await response.write_eof()
    return response


@web.middleware
async def _errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer every error as the OpenAI API does; none ends the process."""
    try:
        return await handler(request)
    except RequestError as error:
        refused = error
    except ServerError as error:
        refused = RequestError(one_line(str(error), 500), status=503)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        refused = RequestError(f"{request.method} {request.path}: {error.reason}", status=error.status)
    except (RecursionError, UnicodeError) as error:
        refused = RequestError(f"the request cannot be read: {one_line(str(error))}")
    except Exception as error:  # a bug in verl must cost one request, not the worker
        logger.exception("the endpoint failed at %s %s", request.method, request.path)
        refused = RequestError(f"{type(error).__name__}: {one_line(str(error), 500)}", status=500)
    return web.json_response(error_body(refused), status=refused.status)
