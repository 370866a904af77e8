"""Short digests of tensors, weights and random state: equal ones stand for equal bits, at the price of one read."""

import hashlib
import random
from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

_BYTES = 8
_INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bytes_digest(*parts: bytes | memoryview) -> str:
    """Return 16 hexadecimal digits of what the parts hold, one after another."""
    state = hashlib.blake2b(digest_size=_BYTES)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def tensor_digest(tensor: Tensor) -> str:
    """Return the digest of the bits, shape and type of a tensor on the CPU, of any type."""
    plain = tensor.detach().contiguous()
    bits = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else np.empty(0, dtype=np.uint8)
    return bytes_digest(f"{plain.dtype} {tuple(plain.shape)}".encode(), memoryview(bits))


def weights_digest(parameters: Iterable[tuple[str, Tensor]]) -> str:
    """Return the digest of this rank's parts of (name, parameter) pairs, wherever they lie.

    The bits of each are added up where they lie, and only the sums are moved: one read of the memory, no copy of it.
    """
    names, sums = [], []
    for name, parameter in parameters:
        part = parameter.detach()
        part = part.to_local() if hasattr(part, "to_local") else part
        names.append(f"{name} {part.dtype} {tuple(part.shape)}")
        sums.append(_sum_of_bits(part))
    values = torch.stack([value.cpu() for value in sums]) if sums else torch.zeros(0, dtype=torch.int64)
    return bytes_digest("\n".join(names).encode(), memoryview(values.numpy()).cast("B"))


def _sum_of_bits(part: Tensor) -> Tensor:
    """Return a 0-dim int64 that adds up the elements' bits, and once more those at odd places."""
    bits = part.contiguous().reshape(-1).view(_INTEGER[part.element_size()])
    return bits.sum(dtype=torch.int64) + bits[1::2].sum(dtype=torch.int64) * 0x9E3779B1


def random_state_digest() -> str:
    """Return the digest of the generators of Python, NumPy and torch in this process, that of the device included."""
    kind, keys, position, has_gauss, gauss = np.random.get_state()
    parts = [repr(random.getstate()).encode(), np.ascontiguousarray(keys).tobytes()]
    parts.append(repr((kind, position, has_gauss, gauss)).encode())
    parts.append(torch.get_rng_state().numpy().tobytes())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        parts.append(torch.cuda.get_rng_state().numpy().tobytes())
    return bytes_digest(*parts)
