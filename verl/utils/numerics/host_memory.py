"""Large tensors in the memory of the host, on huge pages where the system grants them.

The kernel clears memory page by page when it is first written. For a tensor of 256 MB in pages of 4 kB that takes
65,536 page faults and longer than the computation that fills it; in pages of 2 MB it takes a fifth. numpy asks for huge
pages, torch does not.
"""

import math

import numpy as np
import torch
from torch import Tensor

LARGE_BYTES = 1 << 22
"""numpy asks for huge pages from this size on."""


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
