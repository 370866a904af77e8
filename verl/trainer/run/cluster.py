"""Find the Ray cluster that a run on several nodes joins, before Ray is imported."""

import ipaddress
import logging
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import psutil

from verl.errors import WrongInput
from verl.trainer.config.invocation import only_checks
from verl.trainer.config.run_config import RayConfig
from verl.utils import envs

logger = logging.getLogger(__name__)

_FLAG = "--gcs-address="
_HOW = "start Ray on each node (ray start --head --port=6379 on one), and name it: RAY_ADDRESS=<its address>:6379"


class RunningCluster(NamedTuple):
    """A Ray cluster with a node on this machine, and whether this user has started that node."""

    address: str
    is_own: bool


def running_clusters() -> Iterator[RunningCluster]:
    """Yield the clusters of the Ray processes on this machine."""
    for process in psutil.process_iter(["cmdline", "uids"]):
        words = process.info["cmdline"] or [""]  # nothing of a process that has gone
        if os.path.basename(words[0]) != "raylet" or process.info["uids"] is None:
            continue
        for word in words:
            if word.startswith(_FLAG):
                yield RunningCluster(word.removeprefix(_FLAG), process.info["uids"].real == os.getuid())


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches ``HOST:PORT``, whose host may be a name."""
    host = address.removeprefix("ray://").rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(socket.getaddrinfo(host, None)[0][4][0]).is_loopback
    except OSError:  # an unknown name, which the check of the address tells
        return False


def choose_cluster(cluster: RayConfig, nodes: Mapping[str, int]) -> None:
    """Set ``RAY_ADDRESS`` to the cluster that this user has started, if several nodes or ``auto`` ask for one.

    A run on one node without an address stays on this machine. ``nodes`` maps a dotted key to its number of nodes.

    Raises: WrongInput if there is none or more than one, for an address that other nodes cannot reach, and for the
        cluster of another user.
    """
    ray = sys.modules.get("ray")  # without an import, this process has started none
    if only_checks() or (ray and ray.is_initialized()):
        return
    given = (cluster.ray_init or {}).get("address")
    written = given or envs.read("RAY_ADDRESS")
    where = "ray_kwargs.ray_init.address" if given else "environment variable RAY_ADDRESS"
    asking = next((f"{key}={count}" for key, count in nodes.items() if count > 1), None)
    if written not in (None, "", "auto", "local"):
        _check_written(f"{where}={written}", str(written), asking)
    elif written == "auto" or asking and not written:
        address = _only_own_cluster(f"{where}=auto" if written else str(asking))
        logger.warning("%s: joins the Ray cluster at %s, which this user has started", asking or where, address)
        envs.write({"RAY_ADDRESS": address})
        if given:
            cluster.ray_init["address"] = address  # type: ignore[index]


def _only_own_cluster(asking: str) -> str:
    """Return the address of the one cluster that this user has started and that other nodes reach.

    Raises: WrongInput if there is none, or more than one.
    """
    found = sorted({each.address for each in running_clusters() if each.is_own and not is_loopback(each.address)})
    if not found:
        raise WrongInput(f"{asking}: needs a Ray cluster, and this user runs none here: {_HOW}")
    if len(found) > 1:
        raise WrongInput(f"{asking}: this user runs several Ray clusters here: set RAY_ADDRESS to one of {found}")
    return found[0]


def _check_written(named: str, address: str, asking: str | None) -> None:
    """Refuse a cluster of another user, and an address that the ``asking`` number of nodes cannot use.

    Raises: WrongInput naming key or variable.
    """
    if asking and is_loopback(address):
        raise WrongInput(
            f"{named}: this is a loopback address, which other nodes cannot reach, but {asking} needs them: give the "
            "address of the Ray head node in the network of the nodes"
        )
    owners = {each.is_own for each in running_clusters() if each.address == address}
    if owners == {False}:
        raise WrongInput(f"{named}: another user has started this cluster, and its processes would run as that user")
