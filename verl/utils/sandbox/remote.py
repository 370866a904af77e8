"""Run untrusted programs in a remote SandboxFusion service over HTTP."""

import asyncio
import http.client
import json
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Required, TypedDict

from verl.utils.http_client import post_json
from verl.utils.json_types import Json, JsonObject
from verl.utils.masking import MaskedError
from verl.utils.parsing import parse_json

ATTEMPTS = 3
RETRIED_STATUS = 504  # the service was too busy to start the program
RETRY_DELAY_S = 1.0  # multiplied by the number of the attempt
MARGIN_S = 10.0  # added to the program's own time limits
MOST_REPLY_BYTES = 64 << 20


_TEXT = str | None
_NUMBER = int | float | None
_FIELDS = {
    "status": _TEXT,
    "stdout": _TEXT,
    "stderr": _TEXT,
    "return_code": _NUMBER,
    "execution_time": _NUMBER,
}
"""Types of the fields of a result."""


class Part(TypedDict, total=False):
    """Result of the compilation, or of the run, of a program."""

    status: str | None
    stdout: str | None
    stderr: str | None
    return_code: float | None
    execution_time: float | None


class Reply(TypedDict, total=False):
    """Reply of the service for one program."""

    status: Required[str]
    message: Json
    compile_result: Part | None
    run_result: Part | None


class RemoteSandboxError(MaskedError, RuntimeError):
    """The service gave no answer, or an invalid one."""


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """A program is sent to the service of the configuration only."""

    def redirect_request(self, *args: Any) -> None:
        """Follow none; the status becomes an error."""


def run_remotely(
    url: str,
    code: str,
    stdin: str | None = None,
    timeout_s: float = 10.0,
    memory_limit_mb: int = 1024,
    permits: AbstractContextManager[bool | None] | None = None,
    compile_timeout_s: float | None = None,
    language: str = "python",
) -> Reply:
    """Run a program in the service and return the reply.

    Args:
        timeout_s: limit of execution.
        permits: context manager to hold during each request.
        compile_timeout_s: limit of compilation, by default ``timeout_s``.

    Raises: RemoteSandboxError.
    """
    compile_timeout_s = timeout_s if compile_timeout_s is None else compile_timeout_s
    content = json.dumps(_request(code, stdin, timeout_s, compile_timeout_s, memory_limit_mb, language)).encode()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with permits or nullcontext():
                return _post(url, content, compile_timeout_s + timeout_s + MARGIN_S)
        except urllib.error.HTTPError as error:
            if error.code != RETRIED_STATUS or attempt == ATTEMPTS:
                raise RemoteSandboxError(f"{url}: HTTP status {error.code} in attempt {attempt}") from error
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise RemoteSandboxError(f"{url}: {type(error).__name__}: {error}") from error
        time.sleep(RETRY_DELAY_S * attempt)
    raise AssertionError("the last attempt returns or raises")


async def run_remotely_async(
    url: str,
    code: str,
    stdin: str | None = None,
    timeout_s: float = 10.0,
    memory_limit_mb: int = 1024,
    language: str = "python",
) -> Reply:
    """Run like ``run_remotely`` without blocking the event loop; a cancelled run closes its connection.

    Raises: RemoteSandboxError.
    """
    request = _request(code, stdin, timeout_s, timeout_s, memory_limit_mb, language)
    for attempt in range(1, ATTEMPTS + 1):
        try:
            reply = await post_json(url, request, 2 * timeout_s + MARGIN_S)
            if reply.status == http.client.OK:
                return _result(reply.body)
        except (OSError, ValueError) as error:
            raise RemoteSandboxError(f"{url}: {type(error).__name__}: {error}") from error
        if reply.status != RETRIED_STATUS or attempt == ATTEMPTS:
            raise RemoteSandboxError(f"{url}: HTTP status {reply.status} in attempt {attempt}")
        await asyncio.sleep(RETRY_DELAY_S * attempt)
    raise AssertionError("the last attempt returns or raises")


def _request(
    code: str, stdin: str | None, timeout_s: float, compile_timeout_s: float, memory_limit_mb: int, language: str
) -> JsonObject:
    return {
        "compile_timeout": compile_timeout_s,
        "run_timeout": timeout_s,
        "code": code,
        "stdin": stdin,
        "memory_limit_MB": memory_limit_mb,
        "language": language,
        "files": {},
        "fetch_files": [],
    }


def _post(url: str, content: bytes, timeout_s: float) -> Reply:
    """Post JSON and return the JSON reply within ``timeout_s``.

    Raises: OSError (URLError, HTTPError, TimeoutError) or ValueError.
    """
    end = time.monotonic() + timeout_s
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    opener = urllib.request.build_opener(_NoRedirects)
    with opener.open(urllib.request.Request(url, content, headers), timeout=timeout_s) as response:
        parts = []
        size = 0
        while part := response.read1(1 << 16):
            parts.append(part)
            size += len(part)
            if time.monotonic() > end:
                raise TimeoutError(f"the reply was not complete within {timeout_s:g} s")
            if size > MOST_REPLY_BYTES:
                raise ValueError(f"the reply exceeds {MOST_REPLY_BYTES} bytes")
    return _result(b"".join(parts))


def _result(body: bytes) -> Reply:
    """Return a reply of the service.

    Raises: ValueError if it is none.
    """
    reply: Reply = parse_json(body)
    if not isinstance(reply, dict) or not isinstance(reply.get("status"), str):
        raise ValueError(f"the reply is not a program's result: {body[:200]!r}")
    for name in ("compile_result", "run_result"):
        part = reply.get(name) or {}
        if not isinstance(part, dict) or not all(isinstance(part.get(key), kinds) for key, kinds in _FIELDS.items()):
            raise ValueError(f"{name} of the reply is not a program's result: {body[:200]!r}")
    return reply
