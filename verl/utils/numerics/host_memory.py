"""Large tensors in the memory of the host, on huge pages where the system grants them.

The kernel clears memory page by page when it is first written. For a tensor of 256 MB in pages of 4 kB that takes
65,536 page faults and longer than the computation that fills it; in pages of 2 MB it takes a fifth. numpy asks for huge
pages, torch does not.

Memory of a freed tensor is cleared already, so a process that makes and frees such tensors in turn can use it again
(``recycled_like``). Meanwhile the kernel may take it when memory is short (``MADV_FREE``); until it does, it counts as
memory of this process.
"""

import ctypes
import math
import mmap
import weakref
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import numpy as np
import torch
from torch import Tensor

LARGE_BYTES = 1 << 22
"""numpy asks for huge pages from this size on."""
KEPT_BYTES = 1 << 29
"""The most that a process keeps of freed tensors to use again."""
_LARGEST_SURPLUS = 1 / 8
"""A kept block may be larger than a tensor that gets it by this share."""

_Block = np.ndarray[tuple[int], np.dtype[np.uint8]]
_kept: dict[int, _Block] = {}
"""Blocks of freed tensors, the oldest first. Tensors are freed in any thread, so each step is one operation."""


def empty(shape: tuple[int, ...] | torch.Size, dtype: torch.dtype) -> Tensor:
    """Return an uninitialised CPU tensor."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < LARGE_BYTES:
        return torch.empty(shape, dtype=dtype)
    return torch.from_numpy(np.empty(nbytes, dtype=np.uint8)).view(dtype).view(shape)


def empty_like(tensor: Tensor) -> Tensor:
    """Return an uninitialised contiguous tensor of the same shape, dtype and device."""
    if tensor.device.type == "cpu":
        return empty(tensor.shape, tensor.dtype)
    return torch.empty_like(tensor, memory_format=torch.contiguous_format)


def recycled_like(tensor: Tensor) -> Tensor:
    """Return what ``empty_like`` does; a large CPU tensor may have the memory of a freed one that was made here."""
    if tensor.device.type != "cpu" or tensor.nbytes < LARGE_BYTES:
        return empty_like(tensor)
    block = _taken(tensor.nbytes)
    if block is None:
        block = np.empty(tensor.nbytes, dtype=np.uint8)
    own = block[: tensor.nbytes]  # lives as long as a tensor or an array that refers to this memory
    weakref.finalize(own, _keep, block).atexit = False
    return torch.from_numpy(own).view(tensor.dtype).view(tensor.shape)


def drop_kept() -> None:
    """Free the memory that is kept of freed tensors."""
    _kept.clear()


def _taken(nbytes: int) -> _Block | None:
    """Return the smallest kept block that fits, if there is one."""
    fitting = [(size, key) for key, size in _sizes() if nbytes <= size <= nbytes * (1 + _LARGEST_SURPLUS)]
    return _kept.pop(min(fitting)[1], None) if fitting else None


def _keep(block: _Block) -> None:
    """Keep the block of a tensor that was freed, and drop the oldest ones above the limit."""
    if block.nbytes > KEPT_BYTES or not _lend_to_kernel(block):
        return
    _kept[id(block)] = block
    sizes = _sizes()
    total = sum(size for _, size in sizes)
    for key, size in sizes:
        if total <= KEPT_BYTES:
            break
        _kept.pop(key, None)
        total -= size


def _sizes() -> list[tuple[int, int]]:
    return [(key, block.nbytes) for key in list(_kept) if (block := _kept.get(key)) is not None]


def _lend_to_kernel(block: _Block) -> bool:
    """Let the kernel take the pages of a block when it needs them, and return whether it can."""
    madvise = _madvise()
    if madvise is None:
        return False
    address = block.ctypes.data  # its first and last page may have other blocks on them
    start = -(-address // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (address + block.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    return start >= end or madvise(start, end - start, mmap.MADV_FREE) == 0


@cache
def _madvise() -> Callable[[int, int, int], int] | None:
    with suppress(OSError, TypeError, AttributeError):  # another C library, or a system without it
        function = ctypes.CDLL(None).madvise
        function.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        return function if mmap.MADV_FREE else None
    return None
