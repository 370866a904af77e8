"""Large columns of a batch, which travel in slices.

``pickle`` gives each string of bytes new memory, in pages of 4 kB that the kernel clears one by one, and keeps it
until everything is loaded. A column in one string therefore costs several times its copy. Slices that arrive inside a
pickle are copied into the tensor, which lies on huge pages, and emptied, so that the next slice gets the same memory.
Slices that arrive out of band stay in the buffers of the sender until the tensor is needed.
"""

import contextlib
import math
import pickle
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verl.utils.numerics import host_memory

SLICE_BYTES = 1 << 23
"""Bytes of a slice before its integers are narrowed."""
_NARROW_DTYPES = (torch.uint8, torch.int16, torch.int32)
_ALIGNMENT = 8  # bytes

Values = tuple[str, np.ndarray]
"""Part of the values of a tensor: the name of their dtype, and their bytes."""


def narrow_dtype(values: Tensor) -> torch.dtype | None:
    """Return the smallest integer dtype that holds all values of an int64 tensor; None if they need int64."""
    low, high = (int(bound) for bound in torch.aminmax(values))
    fits = (kind for kind in _NARROW_DTYPES if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max)
    return next(fits, None)


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in ``torch``."""
    return str(dtype).removeprefix("torch.")


def values_of(flat: Tensor) -> Values:
    """Return the values of a contiguous CPU tensor as a view."""
    return dtype_name(flat.dtype), flat.view(-1).view(torch.uint8).numpy()


def write_values(target: Tensor, at: int, values: Values) -> int:
    """Write values into a contiguous CPU tensor from element ``at`` on, and return the element after the last one.

    Raises: ValueError when dtypes differ or the values exceed the tensor.
    """
    name, content = values
    sent = getattr(torch, name, None)
    if sent is not target.dtype and not (target.dtype == torch.int64 and sent in _NARROW_DTYPES):
        raise ValueError(f"values of {name!r} are sent for a tensor of {target.dtype}")
    end = at + content.nbytes // sent.itemsize
    if end > target.numel():
        raise ValueError(f"{end} values are sent for a tensor of {target.numel()}")
    part = target.view(-1)[at:end]
    if sent is target.dtype:  # as bytes, because numpy does not have every dtype
        np.copyto(part.view(torch.uint8).numpy(), content)
    else:
        np.copyto(part.numpy(), content.view(name))
    return end


class SlicedColumn:
    """A dense tensor as slices of its values; as the tensor itself once it has arrived inside a pickle."""

    def __init__(self, dtype: str, shape: tuple[int, ...], in_band: bool = False) -> None:
        self.dtype = dtype
        self.shape = shape
        self._slices: list[Values] = []
        self._tensor = self._new_tensor() if in_band else None
        self._filled = 0

    @classmethod
    def of(cls, value: Tensor) -> "SlicedColumn":
        """Cut a dense tensor; slices are views of a contiguous CPU tensor, or narrow copies of int64."""
        flat = value.detach().cpu().contiguous().view(-1)
        parts = torch.split(flat, max(1, SLICE_BYTES // flat.element_size()))
        column = cls(dtype_name(value.dtype), tuple(value.shape))
        column._slices = _narrow(parts) if value.dtype == torch.int64 else [values_of(part) for part in parts]
        return column

    @property
    def slices(self) -> list[Values]:
        """The values in order."""
        return self._slices if self._tensor is None else [values_of(self._tensor)]

    def tensor(self) -> Tensor:
        """Return the tensor, which shares no memory with slices that arrived out of band."""
        if self._tensor is not None:
            return self._tensor
        tensor = self._new_tensor()
        at = 0
        for values in self._slices:
            at = write_values(tensor, at, values)
        return tensor

    def _new_tensor(self) -> Tensor:
        return host_memory.empty(self.shape, getattr(torch, self.dtype))

    # ---- serialization

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # A buffer that is sent twice arrives as one object inside a pickle, and as two out of band.
        probe = pickle.PickleBuffer(bytearray(1)) if protocol >= 5 else None
        slices = SlicedColumn.of(self._tensor)._slices if self._tensor is not None else self._slices
        return start_column, (self.dtype, self.shape, probe, probe), [_Slice(self, values) for values in slices]

    def take(self, name: str, content: Any) -> None:
        """Receive the next slice: copy it now if it arrives inside a pickle, else keep its buffer.

        Raises: ValueError when it does not fit.
        """
        values = name, np.frombuffer(content, dtype=np.uint8)
        if self._tensor is None:
            self._slices.append(values)
            return
        self._filled = write_values(self._tensor, self._filled, values)
        del values
        if isinstance(content, bytearray):  # the unpickler keeps it to the end, and nobody else has it
            with contextlib.suppress(BufferError):  # somebody has: it came out of band after a probe that did not
                content.clear()

    def __setstate__(self, slices: list[None]) -> None:
        """Check that all values have arrived. Raises: ValueError."""
        count = self._filled
        if self._tensor is None:
            count = sum(content.nbytes // getattr(torch, name).itemsize for name, content in self._slices)
        if count != math.prod(self.shape):
            raise ValueError(f"{count} values have arrived of a tensor of shape {self.shape}")


class _Slice:
    """A slice on its way; unpickling hands it to the column."""

    def __init__(self, column: SlicedColumn, values: Values) -> None:
        self.column = column
        self.values = values

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        name, content = self.values
        return take_slice, (
            self.column,
            name,
            pickle.PickleBuffer(content.data) if protocol >= 5 else content.tobytes(),
        )


def start_column(dtype: str, shape: tuple[int, ...], first_probe: Any, second_probe: Any) -> SlicedColumn:
    """Make the column that the slices after it fill, with its tensor if they arrive inside the pickle."""
    in_band = first_probe is None or (first_probe is second_probe and isinstance(first_probe, bytearray))
    return SlicedColumn(dtype, shape, in_band)


def take_slice(column: SlicedColumn, name: str, content: Any) -> None:
    """Hand a received slice to its column."""
    column.take(name, content)


def _narrow(parts: tuple[Tensor, ...]) -> list[Values]:
    """Return parts of an int64 tensor in the smallest integers that hold their values."""
    room = host_memory.empty((sum(part.nbytes // 2 + _ALIGNMENT for part in parts),), torch.uint8)
    slices = []
    at = 0
    for part in parts:
        kind = narrow_dtype(part)
        if kind is None:
            slices.append(values_of(part))
            continue
        end = at + part.numel() * kind.itemsize
        slices.append(values_of(room[at:end].view(kind).copy_(part)))
        at = -(-end // _ALIGNMENT) * _ALIGNMENT
    return slices
