"""Serialization of tensors as numpy buffers, which pickle protocol 5 and Ray move without ``torch.save``.

Ray delivers buffers in read-only shared memory. They are copied once when they are unpickled: torch would write to a
tensor on read-only memory without an error, and ranks that share an object would see each other's writes.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from verl.utils.device import is_cuda_available, is_npu_available

TensorTriple = tuple[str, tuple[int, ...], np.ndarray]

_OTHER = "object"  # layout name of an entry that is not a tensor
_NESTED_DICT = "tensordict"  # layout name of a nested TensorDict


class PicklesItself:
    """A tensor of a class that says by itself what is sent of it."""


def serialize_single_tensor(obj: Tensor) -> TensorTriple:
    """Return (dtype name, shape, bytes); the bytes of a contiguous CPU tensor are a view."""
    flat = obj.detach().cpu().contiguous().reshape(-1)
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


def serialize_tensordict(batch: TensorDict) -> tuple[tuple[int, ...], str | None, dict[str, Any]]:
    """Return (batch size, device, entries); an entry is a triple, or (layout name, parts) if it is not dense."""
    entries: dict[str, Any] = {}
    for key, value in batch.items():
        if isinstance(value, TensorDict):
            entries[key] = (_NESTED_DICT, serialize_tensordict(value))
        elif not isinstance(value, Tensor) or isinstance(value, PicklesItself):
            entries[key] = (_OTHER, value)
        elif value.is_nested:
            layout = str(value.layout).removeprefix("torch.")
            entries[key] = (layout, [serialize_single_tensor(part) for part in value.unbind()])
        else:
            entries[key] = serialize_single_tensor(value)
    device = None if batch.device is None else str(batch.device)
    return tuple(batch.batch_size), device, entries


def deserialize_tensordict(arr: tuple[Any, str | None, dict[str, Any]]) -> TensorDict:
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
    tensors = [deserialize_single_tensor(part) for part in parts]
    return torch.nested.as_nested_tensor(tensors, layout=getattr(torch, layout))


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
