"""Serialization of tensors as numpy buffers, which pickle protocol 5 and Ray move without ``torch.save``.

Ray delivers buffers in read-only shared memory. They are copied once when they are unpickled: torch would write to a
tensor on read-only memory without an error, and ranks that share an object would see each other's writes.

A batch is sent in compact form: large columns of int64, such as token ids and masks, travel in the smallest integers
that hold their values.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils.device import is_cuda_available, is_npu_available
from verl.utils.numerics import host_memory

TensorTriple = tuple[str, tuple[int, ...], np.ndarray]
BatchState = tuple[tuple[int, ...], str | None, dict[str, Any]]
"""Result of ``serialize_tensordict``: batch size, device, and the columns by name."""

_OTHER = "object"  # layout name of an entry that is not a tensor
_NESTED_DICT = "tensordict"  # layout name of a nested TensorDict
_NARROW = "narrow"  # layout name of an int64 tensor that is sent as smaller integers
NARROW_BYTES = 1 << 18
"""Columns of int64 from this size on are sent in compact form."""
_NARROW_DTYPES = (torch.uint8, torch.int16, torch.int32)


class PicklesItself:
    """A tensor of a class that defines its own pickling."""


def serialize_single_tensor(obj: Tensor) -> TensorTriple:
    """Return (dtype name, shape, bytes); the bytes of a contiguous CPU tensor are a view."""
    # Bytes rather than the array: NumPy lacks some dtypes, such as bfloat16.
    flat = obj.detach().cpu().contiguous().view(-1)
    return str(obj.dtype).removeprefix("torch."), tuple(obj.shape), flat.view(torch.uint8).numpy()


def deserialize_single_tensor(arr: TensorTriple) -> Tensor:
    """Rebuild a tensor; it shares the memory of the bytes unless that is read-only."""
    dtype_name, shape, buffer = arr
    if not len(buffer):  # an empty buffer has no defined strides, so a view may fail
        return torch.empty(0, dtype=getattr(torch, dtype_name)).view(shape)
    return torch.from_numpy(writable(buffer)).view(getattr(torch, dtype_name)).view(shape)


def writable(array: np.ndarray) -> np.ndarray:
    """Return the array, or a copy if it is read-only."""
    return array if array.flags.writeable else array.copy()


def _narrowed(value: Tensor) -> Tensor | None:
    """Return a large int64 tensor in the smallest integers that hold its values; None for other tensors."""
    if type(value) is not Tensor or value.dtype != torch.int64 or value.layout != torch.strided:
        return None
    if value.device.type != "cpu" or value.nbytes < NARROW_BYTES:
        return None
    # Token ids and masks are int64 by torch's custom and mostly fit two bytes or one.
    low, high = (int(bound) for bound in torch.aminmax(value))
    for dtype in _NARROW_DTYPES:
        if torch.iinfo(dtype).min <= low and high <= torch.iinfo(dtype).max:
            return host_memory.empty(value.shape, dtype).copy_(value)
    return None


def serialize_tensordict(batch: TensorDict, compact: bool = False) -> BatchState:
    """Return (batch size, device, entries); an entry is a triple, or (layout name, parts) if it is not dense.

    With ``compact``, large tensors of int64 are pairs too.
    """
    entries: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            entries[key] = (_NESTED_DICT, serialize_tensordict(value, compact))
        elif not isinstance(value, Tensor) or isinstance(value, PicklesItself):
            entries[key] = (_OTHER, value)
        elif value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            entries[key] = (layout, [serialize_single_tensor(part) for part in value.unbind()])
        elif compact and (small := _narrowed(value)) is not None:
            entries[key] = (_NARROW, serialize_single_tensor(small))
        else:
            entries[key] = serialize_single_tensor(value)
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, entries


def deserialize_tensordict(arr: BatchState) -> TensorDict:
    """Rebuild a TensorDict on its device, or on the CPU if this process lacks that device.

    Raises: ValueError for an entry that is neither a triple nor a pair.
    """
    batch_size, device, entries = arr
    values = {key: _deserialize_entry(key, entry) for key, entry in entries.items()}
    return TensorDict(values, batch_size=batch_size, device=available_device(device))


def _deserialize_entry(key: str, entry: Any) -> Any:
    if len(entry) == 3:
        return deserialize_single_tensor(entry)
    if len(entry) != 2:
        raise ValueError(f"entry {key!r} must be (dtype, shape, bytes) or (layout, parts), got {len(entry)} elements")
    layout, parts = entry
    if layout == _NESTED_DICT:
        return deserialize_tensordict(parts)
    if layout == _OTHER:
        return parts
    if layout == _NARROW:
        return join_tensors([entry])
    tensors = [deserialize_single_tensor(part) for part in parts]
    return torch.nested.as_nested_tensor(tensors, layout=getattr(torch, layout))


class _Dense(NamedTuple):
    """An entry that is one dense tensor: its dtype, and the triple that was sent."""

    dtype: torch.dtype
    sent: TensorTriple


def _dense(entry: Any) -> _Dense | None:
    """Return the description of an entry that is one dense tensor, else None."""
    if len(entry) == 3:
        return _Dense(getattr(torch, entry[0]), entry)
    return _Dense(torch.int64, entry[1]) if entry[0] == _NARROW else None


def join_tensors(entries: Sequence[Any]) -> Tensor | None:
    """Return the rows of several entries as one tensor, written once from the received buffers.

    None when an entry is no dense tensor, or when dtypes or row shapes differ.
    """
    found = [_dense(entry) for entry in entries]
    columns = [column for column in found if column is not None]
    shapes = [column.sent[1] for column in columns]
    kinds = {(column.dtype, shape[1:]) for column, shape in zip(columns, shapes, strict=True)}
    if len(columns) < len(found) or len(kinds) != 1 or not all(shapes):
        return None
    dtype, row_shape = kinds.pop()
    joined = host_memory.empty((sum(shape[0] for shape in shapes), *row_shape), dtype)
    at = 0
    for column, shape in zip(columns, shapes, strict=True):
        _write(joined[at : at + shape[0]], column.sent)
        at += shape[0]
    return joined


def _write(target: Tensor, sent: TensorTriple) -> None:
    """Write a sent tensor into rows of another one, which may have wider integers.

    Raises: ValueError when shape or dtype do not fit.
    """
    name, shape, content = sent
    fitting = (target.dtype, *_NARROW_DTYPES) if target.dtype == torch.int64 else (target.dtype,)
    dtype = next((each for each in fitting if each is getattr(torch, name, None)), None)
    if dtype is None or content.nbytes != target.numel() * dtype.itemsize:
        raise ValueError(f"{content.nbytes} bytes of {name!r} are sent for a tensor of {target.dtype}, {shape}")
    if dtype is target.dtype:  # as bytes, because numpy does not have every dtype
        np.copyto(target.view(-1).view(torch.uint8).numpy(), content)
    else:
        np.copyto(target.view(-1).numpy(), content.view(name))


def join_tensordicts(states: Sequence[BatchState]) -> TensorDict | None:
    """Return the rows of several encoded TensorDicts as one, or None unless all entries are dense and agree."""
    keys = states[0][2].keys()
    if any(state[2].keys() != keys or state[1] != states[0][1] for state in states):
        return None
    tensors = {}
    for key in keys:
        joined = join_tensors([state[2][key] for state in states])
        if joined is None:
            return None
        tensors[key] = joined
    rows = sum(state[0][0] for state in states)
    return TensorDict(tensors, batch_size=[rows], device=available_device(states[0][1]))


def available_device(device: str | None) -> str | None:
    """Return the device, or ``cpu`` if this process has no such accelerator."""
    if device is None:
        return None
    kind = torch.device(device).type
    available = {"cuda": is_cuda_available, "npu": is_npu_available}.get(kind, True)
    return device if available else "cpu"


class _Packed:
    """A tensor or array that is pickled as a buffer; unpickling returns the plain value."""

    def __init__(self, value: Tensor | np.ndarray) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[..., Tensor | np.ndarray], tuple[np.ndarray | TensorTriple]]:
        if isinstance(self.value, np.ndarray):
            return writable, (self.value,)
        return deserialize_single_tensor, (serialize_single_tensor(self.value),)


def pack_objects(value: Any) -> Any:
    """Wrap the tensors and arrays in dicts, lists, tuples and object arrays so that they are pickled as buffers.

    Lists that start with a number or string are skipped: lists of token ids are long and hold no tensor.
    """
    if type(value) is Tensor:
        dense = value.layout == torch.strided and not value.is_nested
        return _Packed(value) if dense and value.device.type == "cpu" else value
    if type(value) is np.ndarray:
        return _pack_object_array(value) if value.dtype == object else _Packed(value)
    if type(value) is dict:
        return {key: pack_objects(item) for key, item in value.items()}
    if type(value) in (list, tuple) and value and not isinstance(value[0], int | float | str):
        return type(value)(pack_objects(item) for item in value)
    return value


def _pack_object_array(array: np.ndarray) -> np.ndarray:
    first = array.flat[0] if array.size else None
    if isinstance(first, str | int | float):
        return array
    packed = np.empty(array.shape, dtype=object)
    for index, item in enumerate(array.flat):
        packed.flat[index] = pack_objects(item)
    return packed
