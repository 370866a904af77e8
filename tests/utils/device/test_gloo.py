"""Gloo groups have one thread each and share a device; two threads per group corrupt the heap."""

import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import spawn_ranks
from verl.utils.device.gloo import use_one_thread


def _check_groups(rank: int, store: str) -> None:
    use_one_thread()  # a second time
    limit = timedelta(seconds=77)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("ddp", "fsdp"))
    groups = [dist.group.WORLD, mesh["ddp"].get_group(), mesh["fsdp"].get_group()]
    groups.append(dist.new_group([0, 1], timeout=timedelta(seconds=5)))
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    assert [each._threads for each in options] == [1] * len(groups)
    assert (options[0]._timeout, options[-1]._timeout) == (limit, timedelta(seconds=5))
    assert isinstance(groups[0]._get_backend(torch.device("cpu")), dist.ProcessGroupGloo)
    alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=3))
    assert (alone.options._threads, alone.options._timeout) == (1, timedelta(seconds=3))
    works = [dist.all_reduce(torch.ones(1), group=group, async_op=True) for group in groups for _ in range(20)]
    assert all(work.wait() for work in works)
    loops = [task for task in Path("/proc/self/task").iterdir() if (task / "comm").read_text() == "gloo_tcp_loop\n"]
    assert len(loops) == 1  # all groups share a device
    dist.destroy_process_group()


def test_every_group_has_one_thread_and_its_own_timeout(tmp_path: Path) -> None:
    spawn_ranks(_check_groups, (str(tmp_path / "store"),))


def _meet_a_forked_child(rank: int, store: str) -> None:
    use_one_thread()

    def meet(rank: int) -> torch.Tensor:
        group = dist.ProcessGroupGloo(dist.FileStore(store, 2), rank, 2, timeout=timedelta(seconds=300))
        whole = torch.ones(1)
        group.allreduce([whole]).wait()
        return whole

    dist.ProcessGroupGloo(dist.HashStore(), 0, 1)  # makes the device of this process
    child = os.fork()
    if not child:
        code = 1
        try:
            meet(1)
            code = 0
        finally:
            os._exit(code)
    assert meet(0).item() == 2
    assert os.waitpid(child, 0) == (child, 0)


def test_a_forked_child_has_devices_of_its_own(tmp_path: Path) -> None:
    spawn_ranks(_meet_a_forked_child, (str(tmp_path / "store"),), nprocs=1)


def test_an_interface_is_taken_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    use_one_thread()
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,lo")
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=3))
    assert (len(group.options._devices), group.options._threads) == (2, 1)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none_such")
    with pytest.raises(RuntimeError, match="none_such"):
        dist.ProcessGroupGloo(dist.HashStore(), 0, 1)


GATHER_OFTEN = """
import os, sys, torch, torch.distributed as dist
from verl.utils.device.gloo import use_one_thread
if sys.argv[1] == "one":
    use_one_thread()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
whole, part = torch.zeros(1), torch.zeros(1)
for _ in range(3000):
    works = [dist.group.WORLD.allgather_into_tensor_coalesced([whole], [part]) for _ in range(200)]
    [work.wait() for work in works]
os._exit(0)
"""


@pytest.mark.full
@pytest.mark.parametrize("threads", ["one", "torch's"])
def test_one_thread_leaves_the_heap_whole(threads: str) -> None:
    done = subprocess.run([sys.executable, "-c", GATHER_OFTEN, threads], capture_output=True, check=False)
    if threads == "one":
        assert done.returncode == 0, done.stderr[-2000:]
    elif done.returncode == 0:
        pytest.skip("this torch or machine does not show the fault: verl/utils/device/gloo.py may be out of date")
    else:
        assert done.returncode < 0  # by a signal


def test_keywords_of_later_versions_reach_torch() -> None:
    """As torch 2.14's ``enable_reconfigure``, which a field of the options has; an unknown one fails as torch's own."""
    done = subprocess.run([sys.executable, "-c", LATER], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


LATER = """
import pytest, torch.distributed as dist
from verl.utils.device.gloo import use_one_thread

class LaterGroup:
    class _Options:
        enable_reconfigure = False

    create_default_device = staticmethod(lambda: None)

    def __init__(self, store, rank, size, options):
        self.options = options

torch_group, dist.ProcessGroupGloo = dist.ProcessGroupGloo, LaterGroup
use_one_thread()
group = LaterGroup(None, 0, 1, timeout=None, enable_reconfigure=True)
assert (group.options.enable_reconfigure, group.options._threads) == (True, 1)
with pytest.raises(TypeError, match="of_no_version"):
    LaterGroup(None, 0, 1, of_no_version=True)

dist.ProcessGroupGloo = torch_group
def error():
    with pytest.raises(TypeError) as told:
        torch_group(dist.HashStore(), 0, 1, of_no_version=True)
    return str(told.value).partition("Invoked with")[0]
own = error()
use_one_thread()
assert error() == own
"""
