"""Distinguish failures of a service or of this machine from failures that the scored text may have caused."""

import errno
from collections.abc import Iterator

_UNAVAILABLE = frozenset(
    {
        "ConnectionError",  # in Python and in requests
        "gaierror",
        "URLError",
        "ConnectTimeout",
        "ConnectTimeoutError",
        "NewConnectionError",
        "MaxRetryError",
        "ConnectError",
        "NetworkError",
        "RemoteProtocolError",
        "ClientConnectionError",
        "APIConnectionError",
        "RateLimitError",
        "InternalServerError",
        "EndpointError",
        "RemoteSandboxError",
        "MissingPackage",
        "RayError",
        "BrokenExecutor",
    }
)
"""Classes of Python, requests, urllib3, httpx, aiohttp, openai, Ray and verl; by name, since few are installed."""
_OF_TEXT = frozenset({"APITimeoutError", "ReadTimeout", "ReadTimeoutError", "EndpointRefusalError"})
"""Subclasses of them that tell of an answer that took too long or was refused: a text can cause that."""
_ERRNOS = frozenset({errno.ENOSPC, errno.EMFILE, errno.ENFILE, errno.EAGAIN})
_TOO_MANY_REQUESTS = 429
_FIRST_SERVER_ERROR = 500


def is_unavailable(error: BaseException | None) -> bool:
    """Whether an error or one of its causes means that a service did not answer or this machine lacks a resource."""
    return any(_is_unavailable(each) for each in _chain(error))


def _chain(error: BaseException | None) -> Iterator[BaseException]:
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _is_unavailable(error: BaseException) -> bool:
    names = [cls.__name__ for cls in type(error).__mro__]
    status = _status(error)
    if status is not None:
        return status == _TOO_MANY_REQUESTS or status >= _FIRST_SERVER_ERROR
    if isinstance(error, OSError) and error.errno in _ERRNOS:
        return True
    return not _OF_TEXT.intersection(names) and bool(_UNAVAILABLE.intersection(names))


def _status(error: BaseException) -> int | None:
    """Return the HTTP status of the answer that an error holds; None if it holds none."""
    response = getattr(error, "response", None)
    found = (getattr(error, "code", None), getattr(error, "status_code", None), getattr(response, "status_code", None))
    return next((status for status in found if isinstance(status, int) and 400 <= status < 600), None)
