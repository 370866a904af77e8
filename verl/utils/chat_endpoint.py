"""Ask a chat model on an OpenAI-compatible server, with a deadline, retries and bounded concurrency.

It ignores the environment's proxy settings.
"""

import asyncio
import http.client
import json
import logging
import math
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from urllib.parse import urlsplit

from verl.utils.http_client import post_json
from verl.utils.json_types import Json, JsonObject
from verl.utils.masking import MaskedError, masked_text
from verl.utils.parsing import parse_json

logger = logging.getLogger(__name__)

Messages = Sequence[Mapping[str, str]]

MAX_ANSWER_BYTES = 16 << 20
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_SHOWN_CHARS = 200


class EndpointError(MaskedError, RuntimeError):
    """The server gave no answer, for the reason in the message."""


class EndpointRefusalError(EndpointError):
    """The server refuses the request or answers at too great length, perhaps because of the text in the request."""


class _Retry(Exception):
    """An attempt failed but another may succeed, after ``delay_s`` if the server requests a delay."""

    def __init__(self, text: str, delay_s: float | None = None) -> None:
        super().__init__(text)
        self.delay_s = delay_s


@dataclass(frozen=True)
class ChatEndpoint:
    """A model at ``<base_url>/v1/chat/completions`` and the options of its requests.

    Args:
        api_key: bearer token; empty for none.
        sampling: additional fields of each request, such as ``temperature``.
        timeout_s: seconds for one answer, including all attempts and delays.
        retry_delay_s: delay before the second attempt; it doubles for each further one.
    """

    base_url: str
    model: str
    api_key: str = ""
    sampling: Mapping[str, Json] | None = None
    timeout_s: float = 300.0
    max_attempts: int = 3
    retry_delay_s: float = 1.0
    max_concurrency: int = 32

    def __post_init__(self) -> None:
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(
                f"base_url={masked_text(self.base_url)!r} must be a server address, such as http://host:8000"
            )
        for name in ("timeout_s", "max_attempts", "max_concurrency"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name}={getattr(self, name)} must be above 0")
        if self.retry_delay_s < 0:
            raise ValueError(f"retry_delay_s={self.retry_delay_s} must be 0 or more")

    def ask_all(self, conversations: Sequence[Messages], timeout_s: float | None = None) -> list[str | EndpointError]:
        """Return the answer or the error of every conversation, within ``timeout_s`` in total."""
        limit_s = math.inf if timeout_s is None else timeout_s
        end = time.monotonic() + limit_s
        stopped = threading.Event()

        def ask(messages: Messages) -> str | EndpointError:
            try:
                return self._ask(messages, min(time.monotonic() + self.timeout_s, end), stopped)
            except EndpointError as error:
                return error

        pool = ThreadPoolExecutor(min(self.max_concurrency, max(len(conversations), 1)), thread_name_prefix="judge")
        try:
            futures = [pool.submit(ask, messages) for messages in conversations]
            wait(futures, timeout=timeout_s)
            late = EndpointError(f"no answer before the batch's deadline ({limit_s:g} s)")
            return [future.result() if future.done() else late for future in futures]
        finally:  # the caller's time limit may interrupt the wait
            stopped.set()
            pool.shutdown(wait=False, cancel_futures=True)

    async def answer(self, messages: Messages) -> str:
        """Return the answer to one conversation without blocking the event loop; ``max_concurrency`` does not apply.

        Raises: EndpointError if there is none within ``timeout_s``.
        """
        end = time.monotonic() + self.timeout_s
        failures: list[str] = []
        while True:
            try:
                return self._content(*await self._post_async(messages, end))
            except _Retry as failure:
                delay = self._delay_s(failure, failures)
            if len(failures) == self.max_attempts or time.monotonic() + delay >= end:
                raise self._no_answer(failures)
            await asyncio.sleep(delay)

    # ---- one conversation

    def _ask(self, messages: Messages, end: float, stopped: threading.Event) -> str:
        failures: list[str] = []
        while True:
            try:
                return self._attempt(messages, end)
            except _Retry as failure:
                delay = self._delay_s(failure, failures)
            last = len(failures) == self.max_attempts or time.monotonic() + delay >= end
            if last or stopped.wait(delay):
                raise self._no_answer(failures)

    def _delay_s(self, failure: _Retry, failures: list[str]) -> float:
        """Note a failure and return the delay before the next attempt."""
        failures.append(str(failure))
        return failure.delay_s if failure.delay_s is not None else self.retry_delay_s * 2 ** (len(failures) - 1)

    def _no_answer(self, failures: Sequence[str]) -> EndpointError:
        shown = f"{self.base_url}: no answer in {len(failures)} attempts within {self.timeout_s:g} s"
        return EndpointError(f"{shown}; the last error: {failures[-1]}")

    def _attempt(self, messages: Messages, end: float) -> str:
        """Send the request once.

        Raises: _Retry if another attempt may succeed, EndpointError if none can.
        """
        try:
            status, delay_s, body = self._post(messages, end)
        except (OSError, ValueError, http.client.HTTPException) as error:  # refused, interrupted, broken or too slow
            raise _Retry(f"{type(error).__name__}: {error}") from error
        return self._content(status, delay_s, body)

    def _content(self, status: int, delay_s: float | None, body: bytes) -> str:
        """Return the text of a reply; raises as ``_attempt``."""
        text = body.decode(errors="replace")
        if status in _RETRIED:
            raise _Retry(f"HTTP {status}: {text[:_SHOWN_CHARS]}", delay_s)
        if status != http.client.OK:
            raise EndpointRefusalError(f"{self.base_url} refuses the request with HTTP {status}: {text[:_SHOWN_CHARS]}")
        try:
            content = parse_json(text)["choices"][0]["message"]["content"]
        except (ValueError, LookupError, TypeError) as error:
            raise _Retry(f"not a chat completion: {text[:_SHOWN_CHARS]!r}") from error
        if not isinstance(content, str):
            raise _Retry(f"the answer has no text: {text[:_SHOWN_CHARS]!r}")
        return content

    def _request(self, messages: Messages) -> JsonObject:
        return {"model": self.model, "messages": list(messages), **(self.sampling or {})}

    def _headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {}

    def _path(self) -> str:
        return f"{urlsplit(self.base_url).path.rstrip('/').removesuffix('/v1')}/v1/chat/completions"

    async def _post_async(self, messages: Messages, end: float) -> tuple[int, float | None, bytes]:
        """Do the same as ``_post`` without blocking the event loop.

        Raises: _Retry if there is no reply.
        """
        url = urlsplit(self.base_url)._replace(path=self._path(), query="", fragment="").geturl()
        try:
            reply = await post_json(url, self._request(messages), _left(end), self._headers())
        except OSError as error:
            raise _Retry(f"{type(error).__name__}: {error}") from error
        return reply.status, _seconds(reply.retry_after), reply.body

    def _post(self, messages: Messages, end: float) -> tuple[int, float | None, bytes]:
        """Return status, the delay that the server requests, and body."""
        url = urlsplit(self.base_url)
        headers = {"Content-Type": "application/json", "Connection": "close", **self._headers()}
        connect = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
        connection = connect(str(url.hostname), url.port, timeout=_left(end))
        try:
            connection.request("POST", self._path(), json.dumps(self._request(messages)).encode(), headers)
            socket = connection.sock  # the response takes it over
            socket.settimeout(_left(end))
            response = connection.getresponse()
            body = bytearray()
            while chunk := response.read1(1 << 16):
                body += chunk
                if len(body) > MAX_ANSWER_BYTES:
                    raise EndpointRefusalError(f"{self.base_url}: the answer exceeds {MAX_ANSWER_BYTES} bytes")
                socket.settimeout(_left(end))
            return response.status, _seconds(response.getheader("Retry-After")), bytes(body)
        finally:
            connection.close()


def _left(end: float) -> float:
    """Return the seconds until ``end`` on the clock ``time.monotonic``.

    Raises: TimeoutError if it has passed.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise TimeoutError("the deadline has passed")
    return left


def _seconds(value: str | None) -> float | None:
    """Return the seconds of a ``Retry-After`` header; None if it holds a date."""
    try:
        return None if value is None else max(0.0, float(value))
    except ValueError:
        return None
