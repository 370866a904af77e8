"""What a driver sees, and what is left, when a worker dies, hangs or raises."""

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("ray")

import ray
from ray.util.placement_group import remove_placement_group

from tests.single_controller.workers import BrokenWorker, FaultyWorker
from tests.waiting import wait_until
from verl import DataProto
from verl.errors import WorkerDiedError, WorkerTimeoutError
from verl.single_controller.base.driver_phase import phase
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

pytestmark = pytest.mark.usefixtures("ray_cluster")


@pytest.fixture
def make_group() -> Iterator[Callable[..., RayWorkerGroup]]:
    pools: list[RayResourcePool] = []

    def make(cls: type, call_timeout_s: float = 600, workers: int = 2) -> RayWorkerGroup:
        pool = RayResourcePool([workers], max_colocate_count=1, name_prefix="faulty_pool")
        pools.append(pool)
        cia = RayClassWithInitArgs(ray.remote(cls))
        return RayWorkerGroup(pool, cia, device_name="cpu", call_timeout_s=call_timeout_s)

    yield make
    for pool in pools:
        for group in pool.groups:
            group.kill()
        for placement in pool.pgs or []:
            remove_placement_group(placement)


def _is_gone(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in "ZX"


def _strike(pid: int, number: int, marker: Path) -> threading.Thread:
    """Signal a process once both workers have written the marker."""

    def run() -> None:
        wait_until(lambda: all(Path(f"{marker}.{rank}").exists() for rank in (0, 1)))
        os.kill(pid, number)

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("method", ["reduce_all", "sleep_later"])
def test_killed_worker_ends_the_group(method: str, make_group: Callable[..., RayWorkerGroup], tmp_path: Path) -> None:
    group = make_group(FaultyWorker)
    pids = group.pid()
    marker = tmp_path / "entered"
    with phase("update_actor", step=3):
        if method == "sleep_later":
            future = group.sleep_later(DataProto.from_dict({"x": torch.zeros(2)}), 3600.0, str(marker))
            wait, thread = future.get, _strike(pids[1], signal.SIGKILL, marker)
        else:
            thread = _strike(pids[1], signal.SIGKILL, marker)
            wait = partial(group.reduce_all, 100_000_000, 0.001, marker=str(marker))
        later = phase("later", step=9) if method == "sleep_later" else contextlib.nullcontext()
        with later, pytest.raises(WorkerDiedError) as caught:
            wait()
    thread.join()
    error = caught.value
    assert (error.rank, error.site.method, error.site.phase, error.site.step) == (1, method, "update_actor", 3)
    assert (error.site.group, error.site.role, error.actor_name) == (
        "faulty_pool",
        "FaultyWorker",
        group.worker_names[1],
    )
    first_line = str(error).splitlines()[0]
    for part in ("rank 1", "faulty_pool", group.worker_names[1], method, "FaultyWorker", "update_actor", "step 3"):
        assert part in first_line
    assert "ActorDiedError" in error.last_error
    wait_until(lambda: all(map(_is_gone, pids)))


@pytest.mark.parametrize("peers_wait", [False, True])
def test_stopped_worker_meets_the_deadline(make_group: Callable[..., RayWorkerGroup], peers_wait: bool) -> None:
    group = make_group(FaultyWorker, call_timeout_s=600)
    pids = group.pid()
    group.call_timeout_s = 2.0
    started = time.monotonic()
    with pytest.raises(WorkerTimeoutError) as caught:
        group.stop_one(1, peers_wait)
    assert caught.value.ranks == (1,)
    assert "no answer within 2 s; SIGSTOP holds its process" in str(caught.value)
    assert time.monotonic() - started >= 2
    wait_until(lambda: all(map(_is_gone, pids)))


def test_constructor_that_raises_is_named(make_group: Callable[..., RayWorkerGroup]) -> None:
    group = make_group(BrokenWorker, workers=1)
    with pytest.raises(WorkerDiedError, match="__init__") as caught:
        group.anything()
    assert "FileNotFoundError" in str(caught.value) and "no model at /nowhere" in str(caught.value)
