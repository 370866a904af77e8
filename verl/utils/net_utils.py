"""IP addresses and free ports."""

import ipaddress
import random
import re
import socket

from verl.utils import envs

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


PORT_RANGE = "VERL_PORT_RANGE"
"""Variable with the ports of rendezvous, FIRST-LAST, for a firewall between nodes."""
# Above the ports of Ray's workers (to 19999) and below the kernel's ports for outgoing connections (from 32768), so
# that only another rendezvous can take a port between its choice and its use.
_RENDEZVOUS_PORTS = range(20000, 32000)
_random = random.SystemRandom()  # two runs with one seed must not choose the same port
_given: set[int] = set()


def rendezvous_ports() -> range:
    """Return the ports from which a rendezvous takes one.

    Raises: ValueError if the variable is no range of ports.
    """
    written = envs.read(PORT_RANGE)
    if not written:
        return _RENDEZVOUS_PORTS
    found = re.fullmatch(r"(\d+)-(\d+)", written.strip())
    first, last = map(int, found.groups()) if found else (0, 0)
    if not 1024 <= first <= last <= 65535:
        raise ValueError(f"environment variable {PORT_RANGE}={written!r} must be FIRST-LAST, in 1024 to 65535")
    return range(first, last + 1)


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
    """Return a random free port that this process has not returned before, of ``VERL_PORT_RANGE`` if it is set.

    Raises: RuntimeError when none is found; ValueError if the variable is no range of ports.
    """
    ports = rendezvous_ports()
    for port in _random.sample(ports, min(200, len(ports))):
        if port not in _given and _is_free(port):
            _given.add(port)
            return port
    raise RuntimeError(f"no free port among {min(200, len(ports))} tried in {ports.start}-{ports.stop - 1}")
