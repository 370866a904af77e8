"""Large tensors that are recycled get the memory of freed ones, and never that of living ones."""

import gc
import mmap
import re
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from verl.utils.memory_utils import return_freed_host_memory
from verl.utils.numerics import host_memory

MIB = 1 << 20
LARGE = 8 * MIB
needs_lending = pytest.mark.skipif(not hasattr(mmap, "MADV_FREE"), reason="the kernel cannot take kept memory")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    host_memory.drop_kept()
    yield
    host_memory.drop_kept()


def made(nbytes: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
    return host_memory.recycled_like(torch.empty(nbytes // dtype.itemsize, dtype=dtype))


def kept() -> list[int]:
    return [size for _, size in host_memory._sizes()]


@needs_lending
def test_the_next_tensor_of_about_the_size_gets_the_memory() -> None:
    first = made(LARGE, torch.float32)
    place = first.data_ptr()
    del first
    assert kept() == [LARGE]
    assert made(LARGE // 2).data_ptr() != place  # it would waste half
    second = made(15 * LARGE // 16, torch.int64)
    assert second.data_ptr() == place and LARGE not in kept()
    third = made(LARGE, torch.float32)
    assert third.data_ptr() != place
    second.fill_(1)
    third.fill_(2)
    assert second.sum() == len(second)
    del second  # which had less than all of it
    assert LARGE in kept()


@needs_lending
def test_memory_that_something_refers_to_is_not_given_away() -> None:
    for alias in (
        lambda tensor: tensor[5:9],
        lambda tensor: tensor.view(torch.uint8),
        lambda tensor: tensor.numpy()[::2],
        lambda tensor: tensor.untyped_storage(),
        lambda tensor: memoryview(tensor.numpy()),
        lambda tensor: torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda _: tensor),
    ):
        tensor = made(LARGE, torch.int64).fill_(7)
        place, living = tensor.data_ptr(), alias(tensor)
        del tensor
        gc.collect()
        other = made(LARGE, torch.int64)
        assert kept() == [] and other.data_ptr() != place
        del living
        gc.collect()
        assert kept() == [LARGE]
        del other
        host_memory.drop_kept()


@needs_lending
def test_the_oldest_go_above_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "KEPT_BYTES", 20 * MIB)
    tensors = [made(size * MIB) for size in (8, 4, 12, 21)]
    while tensors:
        del tensors[0]
    assert kept() == [4 * MIB, 12 * MIB]
    small = made(host_memory.LARGE_BYTES - 1)
    del small
    assert kept() == [4 * MIB, 12 * MIB]
    return_freed_host_memory()
    assert kept() == []


@needs_lending
@pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")
def test_the_kernel_may_take_what_is_kept() -> None:
    def lent() -> int:
        found = re.findall(r"LazyFree: +(\d+) kB", Path("/proc/self/smaps").read_text())
        return sum(map(int, found)) * 1024

    if not re.search("LazyFree", Path("/proc/self/smaps").read_text()):
        pytest.skip("this kernel does not tell")
    tensor = made(LARGE).fill_(1)
    before = lent()
    del tensor
    assert lent() - before > LARGE / 2  # pages that the kernel is about to sort are left out


class Refused(mmap.mmap):
    """Pages on which the kernel takes no advice."""

    def madvise(self, *advice: int) -> None:
        raise OSError("invalid argument")


def test_nothing_is_kept_where_the_kernel_cannot_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", Refused)
        refused = made(LARGE).fill_(3)
    unknown = made(LARGE).fill_(3)
    monkeypatch.delattr(mmap, "MADV_FREE", raising=False)
    assert int(refused[-1]) == int(unknown[-1]) == 3
    del refused, unknown
    assert kept() == []


@needs_lending
def test_tensors_of_many_threads() -> None:
    """No two living tensors have the same memory, whatever thread frees one."""
    wrong: list[int] = []

    def work(number: int) -> None:
        for at in range(60):
            tensor = made(4 * MIB + 64 * (at % 3)).fill_(number)
            if not bool((tensor == number).all()):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert 1 <= len(kept()) < 4 * 60  # threads that look at the same time may make more than they need
