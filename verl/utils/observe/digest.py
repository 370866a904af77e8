"""Short digests of tensors, weights and random state, to compare runs bit for bit.

Equal digests mean equal bits up to a 64-bit collision. A digest costs one read of the memory.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
import xxhash
from torch import Tensor

from verl.utils.device import get_device_name, get_torch_device

T = TypeVar("T")

_COLUMNS = 512


def bytes_digest(*parts: bytes | memoryview) -> str:
    """Return the digest of the concatenated parts as 16 hexadecimal digits."""
    state = xxhash.xxh3_64()  # as fast as memory; not cryptographic, since nobody forges a digest here
    for part in parts:
        state.update(part)
    return state.hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of dtype, shape and bits of a CPU tensor.

    With two or more dims it is that of the digests of its rows, so that each row can be digested where it lies.
    """
    plain = tensor.detach()
    if plain.dim() >= 2:
        return digest_of_rows(plain.dtype, plain.shape, row_digests(plain))
    return bytes_digest(f"{plain.dtype} {tuple(plain.shape)}".encode(), _bits(plain.contiguous()))


def row_digests(tensor: Tensor) -> np.ndarray:
    """Return the digest of the bits of each row of a CPU tensor, (B,) uint64."""
    count = len(tensor)
    bits = _bits(tensor.detach().contiguous())
    width = len(bits) // count if count else 0
    digest = xxhash.xxh3_64_intdigest
    return np.array([digest(bits[at * width : (at + 1) * width]) for at in range(count)], dtype=np.uint64)


def digest_of_rows(dtype: torch.dtype, shape: Sequence[int], digests: np.ndarray) -> str:
    """Return the digest of a tensor of two or more dims from those of its rows."""
    return bytes_digest(f"{dtype} {tuple(shape)}".encode(), digests.tobytes())


def _bits(plain: Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor."""
    if not plain.numel():
        return memoryview(b"")
    bits: Any = plain.reshape(-1).view(torch.uint8).numpy()
    return memoryview(bits)


def column_digest(values: Iterable[T]) -> str:
    """Return the digest of a data set column: text, numbers, arrays, tensors, images, and containers of them.

    Values of any other type count by their type name only.
    """
    try:
        text = json.dumps(list(values), default=_in_json, skipkeys=True)
    except (ValueError, RecursionError):  # a container that contains itself
        text = "no tree"
    return bytes_digest(text.encode())


def _in_json(value: Any) -> Any:
    if isinstance(value, Tensor):
        return tensor_digest(value.cpu())
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, set | frozenset):
        return sorted(map(repr, value))
    if isinstance(value, np.generic) or (isinstance(value, np.ndarray) and value.dtype == object):
        return value.tolist()
    if isinstance(value, bytes | bytearray):
        return bytes_digest(bytes(value))
    if hasattr(value, "tobytes"):  # an array or an image
        return [str(getattr(value, "shape", None) or getattr(value, "size", None)), bytes_digest(value.tobytes())]
    return type(value).__name__


def weights_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of this rank's shards of (name, parameter) pairs, on any device.

    The device sums the bits and only the sums move to the host, so it costs one read of the weights and no copy.
    """
    names: list[str] = []
    sums: list[Tensor] = []
    for name, parameter in parameters:
        part = parameter.detach()
        part = part.to_local() if hasattr(part, "to_local") else part
        names.append(f"{name} {part.dtype} {tuple(part.shape)}")
        sums += _sums_of_bits(part)
    values = torch.cat([each.to(sums[0].device) for each in sums]).cpu() if sums else torch.zeros(0, dtype=torch.int64)
    return bytes_digest("\n".join(names).encode(), values.numpy().tobytes())


def _sums_of_bits(part: Tensor) -> list[Tensor]:
    """Return the sums of every 512th 64-bit word, then the remaining words and bytes."""
    flat = part.contiguous().reshape(-1)
    if flat.storage_offset() * flat.element_size() % 8:
        flat = flat.clone()  # a view that starts inside a word cannot be read as words
    raw = flat.view(torch.uint8)
    words = raw[: raw.numel() // 8 * 8].view(torch.int64)
    whole = words.numel() // _COLUMNS * _COLUMNS
    sums = words[:whole].view(-1, _COLUMNS).sum(dim=0)
    return [sums, words[whole:], raw[words.numel() * 8 :].to(torch.int64)]


def random_state_digest() -> str:
    """Return the digest of torch's CPU and device generators in this process.

    Python's and NumPy's generators are left out: libraries draw from them unseeded, so equal runs differ in them.
    """
    parts = [torch.get_rng_state().numpy().tobytes()]
    if get_device_name() != "cpu" and (device := get_torch_device()).is_initialized():
        parts.append(device.get_rng_state().numpy().tobytes())
    return bytes_digest(*parts)
