"""The Ray cluster that a run on several nodes joins."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.waiting import wait_until
from verl.errors import WrongInput
from verl.trainer.config.run_config import RayConfig
from verl.trainer.run import cluster
from verl.trainer.run.cluster import RunningCluster, choose_cluster, is_loopback, running_clusters
from verl.utils import envs

TWO = {"trainer.nnodes": 2, "reward_model.nnodes": 1}
ONE = {"trainer.nnodes": 1}
HEAD = "192.0.2.7:6379"
PRIVATE = "127.0.0.1:40000"


@pytest.fixture
def clusters(monkeypatch: pytest.MonkeyPatch) -> list[RunningCluster]:
    """The clusters on this machine; the environment names none of them."""
    found: list[RunningCluster] = [RunningCluster(PRIVATE, True), RunningCluster("192.0.2.8:6379", False)]
    monkeypatch.setattr(cluster, "running_clusters", lambda: iter(found))
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setenv("RAY_ADDRESS", "")  # so that it is reset after the test
    monkeypatch.delenv("RAY_ADDRESS")
    return found


@pytest.mark.parametrize("ray_init", [None, {"num_cpus": 2}, {"address": "auto"}])
def test_several_nodes_join_the_only_cluster_of_this_user(
    clusters: list[RunningCluster], caplog: pytest.LogCaptureFixture, ray_init: dict[str, object] | None
) -> None:
    joined = RayConfig(ray_init=ray_init)
    with pytest.raises(WrongInput, match="trainer.nnodes=2|address=auto: needs a Ray cluster.*ray start --head"):
        choose_cluster(joined, TWO)
    clusters += [RunningCluster(HEAD, True)] * 2  # a head and another node of it on this machine
    choose_cluster(joined, TWO)
    assert joined.address == HEAD and not joined.is_local and HEAD in caplog.text
    clusters.append(RunningCluster("192.0.2.9:6379", True))
    choose_cluster(joined, TWO)  # it is written now
    envs.remove("RAY_ADDRESS")
    with pytest.raises(WrongInput, match="several Ray clusters here: set RAY_ADDRESS to one of"):
        choose_cluster(RayConfig(), TWO)


@pytest.mark.parametrize("ray_init", [None, {"address": "local"}])
def test_one_node_stays_private(clusters: list[RunningCluster], ray_init: dict[str, object] | None) -> None:
    clusters.append(RunningCluster(HEAD, True))
    alone = RayConfig(ray_init=ray_init)
    choose_cluster(alone, ONE)
    assert alone.is_local and envs.read("RAY_ADDRESS") is None


def test_addresses_that_are_refused(clusters: list[RunningCluster], monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("127.0.0.1:6379", "localhost:6379", "[::1]:6379", "127.0.1.1:6379", "ray://127.0.0.1:10001"):
        assert is_loopback(address)
        with pytest.raises(WrongInput, match="address=.*: this is a loopback address.*, but trainer.nnodes=2 needs"):
            choose_cluster(RayConfig(ray_init={"address": address}), TWO)
        choose_cluster(RayConfig(ray_init={"address": address}), ONE)
    assert not is_loopback(HEAD)
    monkeypatch.setenv("RAY_ADDRESS", "192.0.2.8:6379")
    for nodes in (ONE, TWO):
        with pytest.raises(WrongInput, match="variable RAY_ADDRESS=192.0.2.8:6379: another user has started"):
            choose_cluster(RayConfig(), nodes)
    monkeypatch.setenv("RAY_ADDRESS", HEAD)  # on another machine
    choose_cluster(RayConfig(), TWO)


@pytest.fixture
def raylet(tmp_path: Path) -> Iterator[None]:
    """A process with the name and the flags of a raylet."""
    code = "import pathlib, time; pathlib.Path('ready').touch(); time.sleep(600)"
    words = ["/opt/ray/raylet", "-c", code, f"--gcs-address={HEAD}"]
    with subprocess.Popen(words, executable=sys.executable, cwd=tmp_path) as process:
        wait_until((tmp_path / "ready").exists)
        yield
        process.kill()


def test_processes_of_ray_tell_their_cluster_and_its_user(raylet: None, monkeypatch: pytest.MonkeyPatch) -> None:
    assert RunningCluster(HEAD, True) in running_clusters()
    monkeypatch.setattr(os, "getuid", lambda: -1)
    assert RunningCluster(HEAD, False) in running_clusters()
