"""Tools on servers that speak the Model Context Protocol. Only this module imports the package ``mcp``, on use."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypedDict, TypeVar, Unpack

from verl.base_config import nearest, one_line
from verl.errors import WrongInput
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.concurrency import RateLimit
from verl.utils.http_client import url_problem
from verl.utils.import_utils import has_module
from verl.utils.json_types import JsonObject
from verl.utils.masking import MaskedError
from verl.utils.parsing import parse_json

if TYPE_CHECKING:
    from mcp import Client
    from mcp.types import CallToolResult, Tool

T = TypeVar("T")

_FORBIDDEN = frozenset({401, 403})
_EXAMPLE = '{"mcpServers": {"search": {"url": "http://127.0.0.1:8000/mcp", "auth_token": "..."}}}'
_KEYS = ("url", "auth_token")


class McpError(MaskedError, RuntimeError):
    """The server gave no answer, for the reason in the message."""


class McpTimeout(McpError):
    """The server was too slow."""


class McpLimits(TypedDict, total=False):
    """Limits of the calls of a server."""

    rate_limit: float
    timeout_s: float
    max_attempts: int
    retry_delay_s: float


@dataclass
class McpServer:
    """An MCP server and its transport. Each call opens a new session, so no state passes between calls.

    Args:
        rate_limit: calls in a second that a process starts.
        timeout_s: seconds for a call, without the wait for its start.
        max_attempts: attempts to connect; a call that has been sent is not sent again, since it may have had an effect.
    """

    name: str
    url: str
    auth_token: str | None = None
    rate_limit: float = 10.0
    timeout_s: float = 30.0
    max_attempts: int = 10
    retry_delay_s: float = 2.0
    _rate: RateLimit = field(init=False)

    def __post_init__(self) -> None:
        self._rate = RateLimit(self.rate_limit)

    async def schemas(self) -> list[OpenAIFunctionToolSchema]:
        """Return the schemas of the server's tools.

        Raises: McpError.
        """

        async def list_tools(client: "Client") -> "list[Tool]":
            tools: list[Tool] = []
            cursor = None
            while True:
                page = await client.list_tools(cursor=cursor)
                tools += page.tools
                cursor = page.next_cursor
                if not cursor:
                    return tools

        return [
            OpenAIFunctionToolSchema.model_validate(
                {
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "description": tool.description or "",
                        "parameters": tool.input_schema,
                    },
                }
            )
            for tool in await self._ask(list_tools)
        ]

    async def call(self, tool: str, arguments: JsonObject) -> "CallToolResult":
        """Call a tool; the result says itself whether the tool failed.

        Raises: McpError; McpTimeout if it takes longer than ``timeout_s``.
        """
        await self._rate.wait()
        return await self._ask(lambda client: client.call_tool(tool, arguments))

    async def _ask(self, work: Callable[["Client"], Awaitable[T]]) -> T:
        for attempt in range(1, self.max_attempts + 1):
            answers: list[T] = []
            statuses: list[int] = []
            sent = False
            try:
                async with asyncio.timeout(self.timeout_s), self._connection(statuses) as client:
                    sent = True
                    answers.append(await work(client))
                return answers[0]
            except TimeoutError as error:
                raise McpTimeout(f"{self.url}: no answer within {self.timeout_s:g} s") from error
            except Exception as error:
                if answers:  # only the end of the connection failed
                    return answers[0]
                cause = one_line(_cause(error))
                if statuses and statuses[-1] in _FORBIDDEN:
                    text = f"{self.url}: HTTP status {statuses[-1]}: write the auth_token of {self.name}"
                    raise McpError(text) from error
                if sent or attempt == self.max_attempts:
                    raise McpError(f"{self.url}: {cause} in attempt {attempt}") from error
            await asyncio.sleep(self.retry_delay_s)
        raise AssertionError("unreachable: the last attempt returns or raises")

    @asynccontextmanager
    async def _connection(self, statuses: list[int]) -> "AsyncIterator[Client]":
        """Connect, and record the HTTP status of each reply."""
        import httpx2
        from mcp import Client
        from mcp.client.streamable_http import streamable_http_client

        async def note(response: httpx2.Response) -> None:
            statuses.append(response.status_code)

        headers = {} if self.auth_token is None else {"Authorization": f"Bearer {self.auth_token}"}
        async with (
            httpx2.AsyncClient(
                headers=headers, timeout=self.timeout_s, trust_env=False, event_hooks={"response": [note]}
            ) as http_client,
            Client(streamable_http_client(self.url, http_client=http_client)) as client,
        ):
            yield client


def read_servers(path: str, **limits: Unpack[McpLimits]) -> list[McpServer]:
    """Return the servers of a JSON file, ``{"mcpServers": {name: {"url", "auth_token"}}}``.

    Raises: WrongInput naming the file, the server and the key, and what to write.
    """
    try:
        with open(os.path.expanduser(path), encoding="utf-8") as file:
            content = parse_json(file.read())
    except (OSError, ValueError) as error:
        raise WrongInput(f"{path}: cannot be read as JSON: {one_line(str(error))}: write {_EXAMPLE}") from error
    named = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(named, dict) or not named:
        raise WrongInput(f"{path}: has no servers under mcpServers: write {_EXAMPLE}")
    servers = []
    for name, node in named.items():
        where = f"{path}, mcpServers.{name}"
        if not isinstance(node, dict):
            raise WrongInput(f"{where}: is no object: write {_EXAMPLE}")
        for key in node:
            if key not in _KEYS:
                near = ", ".join(nearest(key, _KEYS)) or "url"
                raise WrongInput(f"{where}: the key {key!r} is unknown: servers are reached over HTTP: write {near}")
        problem = url_problem(node.get("url"))
        if problem is not None:
            raise WrongInput(f"{where}.url={node.get('url')!r}: {problem}")
        token = node.get("auth_token")
        if token is not None and not isinstance(token, str):
            raise WrongInput(f"{where}.auth_token: is no text: write the token of the server, or leave it out")
        servers.append(McpServer(name, node["url"], token or None, **limits))
    return servers


def require_mcp() -> None:
    """Raise WrongInput if the package is not installed."""
    if not has_module("mcp"):
        raise WrongInput("tools of type mcp need the package mcp, which is not installed: pip install 'verl[tools]'")


def _cause(error: BaseException) -> str:
    """Return the first error inside the groups in which task groups wrap it."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return f"{type(error).__name__}: {error}"
