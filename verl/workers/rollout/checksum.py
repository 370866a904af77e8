"""A checksum of weights that detects any changed bit and moved rows or columns, without a copy of the tensor."""

import torch
from torch import Tensor

_CHUNK_ELEMENTS = {"cpu": 1 << 17}
_CHUNK_ELEMENTS_DEFAULT = 1 << 23
"""Elements to read at once: as many as fit a CPU's cache, or keep an accelerator busy."""
_FIRST_COLUMN = 1 << 40  # larger than any row number, so that a transposed matrix has another sum
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _index_weights(count: int, first: int, device: torch.device) -> Tensor:
    """Return an odd pseudo-random int64 for each of ``count`` indices, starting at ``first``."""
    index = torch.arange(first, first + count, dtype=torch.int64, device=device) * -7046029254386353131
    return ((index ^ (index >> 29)) * -4658895280553007687) | 1


def tensor_checksum(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return a 0-dim int64 checksum of the bits that ``tensor`` has after a cast to ``dtype``.

    Plain form: ``sum(bits[i, j] * (w[i] + v[j])) mod 2**64`` over rows i and columns j, with pseudo-random weights w
    and v. The weights make swapped rows, swapped columns and a transposed matrix visible, which a plain sum hides.
    """
    matrix = tensor.detach()
    matrix = matrix.reshape(-1, 1) if matrix.dim() < 2 else matrix.flatten(1)
    rows, columns = matrix.shape
    dtype = dtype or matrix.dtype
    of_row = _index_weights(rows, 1, matrix.device)
    of_column = _index_weights(columns, _FIRST_COLUMN, matrix.device)
    step = max(1, _CHUNK_ELEMENTS.get(matrix.device.type, _CHUNK_ELEMENTS_DEFAULT) // max(1, columns))
    total = torch.zeros((), dtype=torch.int64, device=matrix.device)
    for start in range(0, rows, step):
        bits = matrix[start : start + step].to(dtype).view(_INTEGER[dtype.itemsize]).to(torch.int64)
        total += (bits.sum(dim=1) * of_row[start : start + step]).sum() + (bits.sum(dim=0) * of_column).sum()
    return total
