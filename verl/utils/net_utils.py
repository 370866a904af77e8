"""IP addresses and free ports."""

import ipaddress
import random
import socket

LOOPBACK = "127.0.0.1"
"""Where ranks meet that are all on one machine."""
LOCAL_HOSTS = (LOOPBACK, "localhost", "::1")
"""Addresses that only programs of this machine reach."""


def is_ipv4(ip_str: str) -> bool:
    """Whether a string is an IPv4 address."""
    return _version_of(ip_str) == 4


def is_ipv6(ip_str: str) -> bool:
    """Whether a string is an IPv6 address, without brackets."""
    return _version_of(ip_str) == 6


def _version_of(address: str) -> int | None:
    try:
        return ipaddress.ip_address(address).version
    except ValueError:
        return None


# Above the ports of Ray's workers (to 19999) and below the kernel's ports for outgoing connections (from 32768), so
# that only another rendezvous can take a port between its choice and its use.
_RENDEZVOUS_PORTS = range(20000, 32000)
_random = random.SystemRandom()  # two runs with one seed must not choose the same port
_given: set[int] = set()


def _is_free(port: int) -> bool:
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.bind((address, port))
        except OSError:
            if family == socket.AF_INET:
                return False  # hosts without IPv6 fail the second probe for every port
    return True


def get_free_port() -> int:
    """Return a random free port that this process has not returned before.

    Raises: RuntimeError when none is found.
    """
    for port in _random.sample(_RENDEZVOUS_PORTS, 200):
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise RuntimeError(f"no free port among 200 tried in {_RENDEZVOUS_PORTS}")
