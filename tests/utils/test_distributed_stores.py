"""Stores of ranks that are all on one machine listen at its loopback address, which no other machine reaches."""

import socket
from datetime import timedelta

import psutil
import pytest

from verl.utils.distributed import TCPStore, _store_of_one_machine, listening_store
from verl.workers.rollout.weight_channel import open_store

TIMEOUT = timedelta(seconds=600)


def addresses(port: int) -> list[str]:
    """Return the addresses at which this process listens on a port."""
    found = psutil.Process().net_connections("inet")
    return [each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN and each.laddr.port == port]


def test_a_store_listens_at_one_address_and_frees_its_port() -> None:
    store = listening_store("127.0.0.1", 0, 1, TIMEOUT)
    port = store.port
    assert addresses(port) == ["127.0.0.1"]
    other = TCPStore("127.0.0.1", port, 1, is_master=False, timeout=TIMEOUT)
    other.set("a", "b")
    assert store.get("a") == b"b"
    with pytest.raises(OSError):
        listening_store("127.0.0.1", port, 1, TIMEOUT)
    del other, store
    assert addresses(port) == []
    assert listening_store("127.0.0.1", port, 1, TIMEOUT).port == port  # a second group of the same ranks


def test_ranks_of_one_machine_meet_at_its_loopback_address(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}.items():
        monkeypatch.setenv(name, value)
    store = _store_of_one_machine(TIMEOUT)
    assert store is not None and addresses(port) == ["127.0.0.1"]
    monkeypatch.setenv("RANK", "1")
    other = _store_of_one_machine(TIMEOUT)
    assert other is not None and addresses(port) == ["127.0.0.1"]
    other.set("from", "another rank")
    assert store.get("from") == b"another rank"
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    assert _store_of_one_machine(TIMEOUT) is None


def test_weights_are_sent_over_one_address() -> None:
    store, meeting = open_store("127.0.0.1", 3, "gloo", 600.0)
    assert addresses(meeting.port) == ["127.0.0.1"] and meeting.host == "127.0.0.1"
    del store
