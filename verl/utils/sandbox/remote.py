"""Programs in a remote sandbox: the HTTP interface of SandboxFusion."""

import json
import time
import urllib.error
import urllib.request
from contextlib import AbstractContextManager, nullcontext
from typing import Any

ATTEMPTS = 3
RETRIED_STATUS = 504  # the service was too busy to begin
RETRY_DELAY_S = 1.0  # times the number of the attempt
MARGIN_S = 10.0  # of the connection over what the program may take
MOST_REPLY_BYTES = 64 << 20


class RemoteSandboxError(RuntimeError):
    """The service did not answer, or with something that is no answer."""


def run_remotely(
    url: str,
    code: str,
    stdin: str | None = None,
    timeout_s: float = 10.0,
    memory_limit_mb: int = 1024,
    language: str = "python",
    permits: AbstractContextManager[Any] | None = None,
) -> dict[str, Any]:
    """Run a program in the service and return its reply.

    Args:
        timeout_s: limit of compilation and of execution, each.
        permits: held during each request.

    Raises: RemoteSandboxError.
    """
    request = {
        "compile_timeout": timeout_s,
        "run_timeout": timeout_s,
        "code": code,
        "stdin": stdin,
        "memory_limit_MB": memory_limit_mb,
        "language": language,
        "files": {},
        "fetch_files": [],
    }
    content = json.dumps(request).encode()
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with permits or nullcontext():
                return _post(url, content, 2 * timeout_s + MARGIN_S)
        except urllib.error.HTTPError as error:
            if error.code != RETRIED_STATUS or attempt == ATTEMPTS:
                raise RemoteSandboxError(f"{url}: HTTP status {error.code} in attempt {attempt}") from error
        except (OSError, ValueError) as error:
            raise RemoteSandboxError(f"{url}: {type(error).__name__}: {error}") from error
        time.sleep(RETRY_DELAY_S * attempt)
    raise AssertionError("the last attempt returns or raises")


def _post(url: str, content: bytes, timeout_s: float) -> dict[str, Any]:
    """Post JSON and return the JSON of the reply, all of it within a time.

    Raises: OSError (URLError, HTTPError, TimeoutError) or ValueError.
    """
    end = time.monotonic() + timeout_s
    headers = {"Content-Type": "application/json", "Accept": "application/json"}
    with urllib.request.urlopen(urllib.request.Request(url, content, headers), timeout=timeout_s) as response:
        parts, size = [], 0
        while part := response.read1(1 << 16):
            parts.append(part)
            size += len(part)
            if time.monotonic() > end:
                raise TimeoutError(f"the reply was not complete within {timeout_s:g} s")
            if size > MOST_REPLY_BYTES:
                raise ValueError(f"the reply is longer than {MOST_REPLY_BYTES} bytes")
    reply = json.loads(b"".join(parts))
    if not isinstance(reply, dict) or "status" not in reply:
        raise ValueError(f"the reply is no result of a program: {str(reply)[:200]}")
    return reply
