"""What a process has freed goes back to the system, or stays with the process."""

import platform
import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest
import torch

from verl.utils import memory_utils
from verl.utils.memory_utils import return_freed_host_memory, return_freed_host_memory_if_short

MIB = 1 << 20


@pytest.mark.skipif(sys.platform != "linux", reason="asks glibc")
def test_freed_tensors_between_living_ones_are_returned() -> None:
    resident = psutil.Process().memory_info
    for size in (8, 30):  # once a mapping of some size is freed, glibc keeps what is smaller
        torch.empty(size * MIB, dtype=torch.uint8)
    return_freed_host_memory()
    before = resident().rss
    freed, living = [], []
    for _ in range(16):
        freed.append(torch.ones(4 * MIB, dtype=torch.uint8))
        living.append(torch.ones(8 * 1024, dtype=torch.uint8))
    assert resident().rss - before > 60 * MIB
    freed.clear()
    return_freed_host_memory()
    assert resident().rss - before < 8 * MIB
    assert all(tensor.sum() == 8 * 1024 for tensor in living)


@pytest.mark.parametrize(("available", "short"), [(3 << 30, False), (2 << 30, False), ((2 << 30) - 1, True)])
def test_memory_is_returned_where_less_than_a_quarter_is_left(monkeypatch, available: int, short: bool) -> None:
    returned: list[bool] = []
    left = SimpleNamespace(total=8 << 30, available=available)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: left)
    monkeypatch.setattr(memory_utils, "return_freed_host_memory", lambda: returned.append(True))
    return_freed_host_memory_if_short()
    assert returned == [True] * short


KEEPS = """
import resource, sys, torch
from verl.utils.memory_utils import keep_freed_host_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    torch.ones(64 << 20, dtype=torch.uint8)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

def after_the_first(times):
    found = [faults() for _ in range(times)]
    return max(found[-3:])

assert not sys.argv[1:] or keep_freed_host_memory()
print(after_the_first(12))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="asks glibc")
def test_a_process_keeps_the_pages_of_large_tensors() -> None:
    """A tensor of 64 MB has 16,384 pages of 4 kB, or fewer that are larger; a kept one needs none.

    A freed block is a few bytes too small for the next one of its size, unless what is beside it is free as well. So
    some blocks come first that are used in turn afterwards.
    """
    new, kept = (
        int(subprocess.run([sys.executable, "-c", KEEPS, *words], check=True, capture_output=True, text=True).stdout)
        for words in ([], ["keep"])
    )
    assert kept < 16 <= new
