"""Large tensors in the memory of the host, on huge pages where the system grants them.

The kernel clears memory page by page when it is first written. For a tensor of 256 MB in pages of 4 kB that takes
65,536 page faults and longer than the computation that fills it; in pages of 2 MB it takes a fifth. numpy asks for huge
pages, torch does not.

Memory of a freed tensor is cleared already, so a process that makes and frees such tensors in turn can use it again
(``recycled_like``). Meanwhile the kernel may take it when memory is short (``MADV_FREE``); until it does, it counts as
memory of this process.
"""

import math
import mmap
import weakref

import numpy as np
import torch
from torch import Tensor

LARGE_BYTES = 1 << 22
"""numpy asks for huge pages from this size on."""
KEPT_BYTES = 1 << 29
"""The most that a process keeps of freed tensors to use again."""
_LARGEST_SURPLUS = 1 / 8
"""Kept pages may be larger than a tensor that gets them by this share."""

_kept: dict[int, mmap.mmap] = {}
"""Pages of freed tensors, the oldest first. Tensors are freed in any thread, so each step is one operation."""


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
    """Allocate like ``empty_like``; a large CPU tensor may reuse the memory of a freed tensor made here."""
    if tensor.device.type != "cpu" or tensor.nbytes < LARGE_BYTES:
        return empty_like(tensor)
    pages = _taken(tensor.nbytes) or _new_pages(tensor.nbytes)
    own = np.frombuffer(pages, dtype=np.uint8, count=tensor.nbytes)  # lives as long as anything refers to the tensor
    weakref.finalize(own, _keep, pages).atexit = False
    return torch.from_numpy(own).view(tensor.dtype).view(tensor.shape)


def drop_kept() -> None:
    """Free the memory that is kept of freed tensors."""
    _kept.clear()


def _new_pages(nbytes: int) -> mmap.mmap:
    pages = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    _advise(pages, "MADV_HUGEPAGE")
    return pages


def _taken(nbytes: int) -> mmap.mmap | None:
    """Return the smallest kept pages that fit, if there are any."""
    fitting = [(size, key) for key, size in _sizes() if nbytes <= size <= nbytes * (1 + _LARGEST_SURPLUS)]
    return _kept.pop(min(fitting)[1], None) if fitting else None


def _keep(pages: mmap.mmap) -> None:
    """Keep the pages of a tensor that was freed, if the kernel can take them, and drop the oldest above the limit."""
    if len(pages) > KEPT_BYTES or not _advise(pages, "MADV_FREE"):
        return
    _kept[id(pages)] = pages
    sizes = _sizes()
    total = sum(size for _, size in sizes)
    for key, size in sizes:
        if total <= KEPT_BYTES:
            break
        _kept.pop(key, None)
        total -= size


def _sizes() -> list[tuple[int, int]]:
    return [(key, len(pages)) for key in list(_kept) if (pages := _kept.get(key)) is not None]


def _advise(pages: mmap.mmap, name: str) -> bool:
    """Give the kernel a piece of advice on pages, and return whether it knows it."""
    try:
        pages.madvise(getattr(mmap, name))
    except (AttributeError, OSError):
        return False
    return True
