"""Ask a web service without blocking the event loop; a cancelled request closes its connection."""

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urljoin, urlsplit

from verl.utils.json_types import Json
from verl.utils.masking import MaskedError

if TYPE_CHECKING:
    import aiohttp

MOST_REPLY_BYTES = 64 << 20
_REPEATS = (307, 308)
"""Statuses of redirects that repeat the request with its content."""
_MOST_REDIRECTS = 5


class NoReply(MaskedError, OSError):
    """The service cannot be reached, or broke off the connection."""


class NoReplyInTime(NoReply, TimeoutError):
    """The service was too slow."""


@dataclass(frozen=True)
class Reply:
    """Reply of a service; ``retry_after`` is its header ``Retry-After``."""

    status: int
    body: bytes
    retry_after: str | None = None

    @property
    def text(self) -> str:
        """The body as text."""
        return self.body.decode(errors="replace")


def url_problem(url: Any) -> str | None:
    """Return the fault of a service's address; None if it is valid."""
    if not isinstance(url, str):
        return "write the address of the service, such as http://127.0.0.1:8000"
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # such as a port that is no number
        is_address = False
    return None if is_address else "write an address with http:// or https://, such as http://127.0.0.1:8000"


async def post_json(
    url: str, content: Mapping[str, Json], timeout_s: float, headers: Mapping[str, str] | None = None
) -> Reply:
    """Post JSON and return the whole reply, whatever its status.

    It ignores the proxy settings of the environment: the services are those of a run. The content goes to no other
    address: a redirect within the address (``/search`` to ``/search/``) is followed, any other is the reply.

    Raises: NoReply; NoReplyInTime if the reply is not complete within ``timeout_s``.
    """
    import aiohttp

    body = json.dumps(content).encode()
    headers = {"Content-Type": "application/json", "Accept": "application/json", **(headers or {})}
    try:
        # Requests are rare and long compared to a connection, and sessions must not outlive their event loop.
        async with (
            asyncio.timeout(timeout_s),
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as session,
        ):
            address = url
            for _ in range(_MOST_REDIRECTS):
                options: Any = {"data": body, "headers": headers, "timeout": aiohttp.ClientTimeout(total=None)}
                async with session.post(address, allow_redirects=False, **options) as response:
                    reply = Reply(response.status, await _body(response), response.headers.get("Retry-After"))
                    following = urljoin(address, response.headers.get("Location", ""))
                if reply.status not in _REPEATS or urlsplit(following)[:2] != urlsplit(url)[:2]:
                    return reply
                address = following
            raise NoReply(f"{url}: more than {_MOST_REDIRECTS} redirects")
    except TimeoutError as error:
        raise NoReplyInTime(f"{url}: no complete reply within {timeout_s:g} s") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        if isinstance(error, NoReply):
            raise
        raise NoReply(f"{url}: {type(error).__name__}: {error}") from error


async def _body(response: "aiohttp.ClientResponse") -> bytes:
    parts = bytearray()
    async for part in response.content.iter_any():
        parts += part
        if len(parts) > MOST_REPLY_BYTES:
            raise NoReply(f"{response.url}: the reply exceeds {MOST_REPLY_BYTES} bytes")
    return bytes(parts)
