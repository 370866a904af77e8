"""Fetch images and videos from web addresses that a data row names, without reaching into a private network."""

import http.client
import ipaddress
import re
import socket
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import unquote, urlsplit

from verl.utils.vision.images import MediaError
from verl.utils.vision.limits import MediaConfig

_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
_READ_BYTES = 1 << 16

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def scheme_of(source: str) -> str | None:
    """Return the scheme of an address, such as ``https``; None for the path of a file."""
    found = _SCHEME.match(source)
    return None if found is None or found[1].lower() == "file" else found[1].lower()


def addresses_in(value: Any) -> Iterator[str]:
    """Yield the web addresses in an image or video as a tool may describe it."""
    if isinstance(value, str):
        if scheme_of(value) is not None:
            yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from addresses_in(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from addresses_in(each)


def check_no_address(media: MediaConfig, *given: Any) -> None:
    """Refuse images and videos of a tool that are addresses, unless ``media.any_address`` allows them.

    Raises: MediaError with the address.
    """
    named = next(addresses_in(given), None)
    if named is not None and not media.any_address:
        raise MediaError(f"it names the address {named[:100]!r}: tools name none, unless data.media.any_address=true")


def fetch(url: str, media: MediaConfig) -> bytes:
    """Download the content of an ``http`` or ``https`` address.

    The addresses of its name are checked before each connection, also those of redirects.

    Raises: MediaError for another scheme, a private address without ``media.any_address``, more than
        ``media.max_bytes``, and for a transfer that takes longer than ``media.max_s``.
    """
    if scheme_of(url) not in ("http", "https"):
        raise MediaError(f"the address {url[:100]!r} must begin with https:// or http://")
    end = time.monotonic() + media.max_s
    sockets: list[socket.socket] = []

    def connect(address: tuple[str, int], *args: Any, **kwargs: Any) -> socket.socket:
        connected = _connected(*address, media, end)
        sockets.append(connected)
        return connected

    opener = _opener(connect, media)
    try:
        with _shut_later(sockets, media.max_s), opener.open(url, timeout=media.max_s) as response:
            content = bytearray()
            while part := response.read1(_READ_BYTES):
                content += part
                if len(content) > media.max_bytes:
                    raise MediaError(f"it has more bytes than data.media.max_mb={media.max_mb} allows")
            if time.monotonic() > end:
                raise TimeoutError
            return bytes(content)
    except (OSError, ValueError, http.client.HTTPException) as error:
        is_late = isinstance(error, TimeoutError) or time.monotonic() > end
        reason = f"it takes longer than data.media.max_s={media.max_s:g}" if is_late else _reason(error)
        raise MediaError(f"{url[:100]!r} cannot be fetched: {reason}") from error


def _reason(error: Exception) -> str:
    inner = getattr(error, "reason", None)
    return str(inner if isinstance(inner, Exception) else error) or type(error).__name__


@contextmanager
def _shut_later(sockets: list[socket.socket], seconds: float) -> Iterator[None]:
    """Shut the connections of the block after some seconds: a server that sends a byte now and then never times out."""

    def shut() -> None:
        for each in sockets:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(seconds, shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _connected(host: str, port: int, media: MediaConfig, end: float) -> socket.socket:
    """Connect to a host name, whose addresses must all be public unless the configuration allows others."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    _check_public(host, [each[4][0] for each in found], media)
    failure: OSError | None = None
    for _, _, _, _, address in found:
        try:
            return socket.create_connection((str(address[0]), port), max(0.01, end - time.monotonic()))
        except OSError as error:
            failure = error
    raise failure or OSError(f"{host} has no address")


def _check_public(host: str, addresses: Sequence[str | int], media: MediaConfig) -> None:
    private = [each for each in addresses if not is_public(ipaddress.ip_address(str(each).partition("%")[0]))]
    if private and not media.any_address:
        raise MediaError(f"{host} is {private[0]}, which is no public address: data.media.any_address=true allows it")


def is_public(address: Address) -> bool:
    """Whether an address is in the public internet, not on this machine, in its network, or behind a tunnel to it."""
    if isinstance(address, ipaddress.IPv6Address):
        inner = address.ipv4_mapped or address.sixtofour or (address.teredo or (None, None))[1]
        if inner is None and (address in _NAT64 or int(address) < 1 << 32):
            inner = ipaddress.IPv4Address(int(address) & 0xFFFFFFFF)
        if inner is not None:
            return is_public(inner)
    return address.is_global and not address.is_multicast


def _opener(connect: Callable[..., socket.socket], media: MediaConfig) -> urllib.request.OpenerDirector:
    """Return an opener of ``http`` and ``https`` only, also for redirects."""

    class Connections(urllib.request.AbstractHTTPHandler):
        def _open(
            self, kind: Callable[..., http.client.HTTPConnection], request: urllib.request.Request
        ) -> http.client.HTTPResponse:
            tunnel = getattr(request, "_tunnel_host", None)

            def made(host: str, **options: Any) -> http.client.HTTPConnection:
                connection = kind(host, **options)
                if not tunnel and not request.has_proxy():
                    connection._create_connection = connect  # type: ignore[attr-defined]
                    return connection
                name = str(urlsplit(f"//{tunnel}" if tunnel else request.full_url).hostname)
                with suppress(socket.gaierror):  # only the proxy might be able to resolve the name
                    found = socket.getaddrinfo(unquote(name), None)
                    _check_public(name, [each[4][0] for each in found], media)
                return connection

            return self.do_open(made, request)

        def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self._open(http.client.HTTPConnection, request)

        def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
            return self._open(http.client.HTTPSConnection, request)

        http_request = https_request = urllib.request.AbstractHTTPHandler.do_request_

    opener = urllib.request.OpenerDirector()
    for handler in (
        urllib.request.ProxyHandler(),
        Connections(),
        urllib.request.HTTPRedirectHandler(),
        urllib.request.HTTPErrorProcessor(),
        urllib.request.HTTPDefaultErrorHandler(),
        urllib.request.UnknownHandler(),
    ):
        opener.add_handler(handler)
    return opener
