"""What a process has freed goes back to the system."""

import sys

import psutil
import pytest
import torch

from verl.utils.memory_utils import return_freed_host_memory

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
