"""The checksum of weights, against a slow reference, and what it must tell apart."""

import pytest
import torch
from torch import Tensor

from verl.workers.rollout import checksum
from verl.workers.rollout.checksum import tensor_checksum

BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float64: torch.int64, torch.uint8: torch.int8}


def odd_weight(index: int) -> int:
    """The weight of an index in unbounded integers, arithmetic shift and all."""

    def wrap(value: int) -> int:
        value %= 2**64
        return value - 2**64 if value >= 2**63 else value

    mixed = wrap(index * -7046029254386353131)
    return wrap((mixed ^ (mixed >> 29)) * -4658895280553007687) | 1


def slow_checksum(tensor: Tensor) -> int:
    matrix = tensor.reshape(tensor.shape[0], -1)
    bits = matrix.contiguous().view(BITS[tensor.dtype]).tolist()
    total = sum(
        value * (odd_weight(1 + row) + odd_weight(2**40 + column))
        for row, line in enumerate(bits)
        for column, value in enumerate(line)
    )
    total %= 2**64
    return total - 2**64 if total >= 2**63 else total


@pytest.mark.parametrize("dtype", list(BITS))
@pytest.mark.parametrize("shape", [(7,), (5, 3), (2, 3, 4)])
def test_against_a_slow_reference(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * 50).to(dtype)
    assert int(tensor_checksum(tensor)) == slow_checksum(tensor)


def test_independent_of_chunks_and_memory_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    tensor = torch.randn(33, 20)
    whole = tensor_checksum(tensor)
    monkeypatch.setitem(checksum._CHUNK_ELEMENTS, "cpu", 45)
    assert tensor_checksum(tensor) == whole
    assert tensor_checksum(tensor.t().contiguous().t()) == whole
    wide = torch.cat([tensor, torch.randn(33, 5)], dim=1)
    assert tensor_checksum(wide[:, :20]) == whole


def test_cast_before_the_sum() -> None:
    tensor = torch.randn(9, 9)
    assert tensor_checksum(tensor, torch.bfloat16) == tensor_checksum(tensor.bfloat16())
    assert tensor_checksum(tensor) != tensor_checksum(tensor.bfloat16())


def test_every_change_shows() -> None:
    tensor = torch.randn(6, 6, generator=torch.Generator().manual_seed(2))
    negative_zero = tensor.clone()
    tensor[0, 0], negative_zero[0, 0] = 0.0, -0.0
    changes = [negative_zero, tensor.t(), tensor.flip(0), tensor.flip(1), tensor[torch.tensor([1, 0, 2, 3, 4, 5])]]
    for bit in range(32):
        changed = tensor.clone()
        changed.view(torch.int32)[3, 4] ^= 1 << bit if bit < 31 else -(1 << 31)
        changes.append(changed)
    sums = {int(tensor_checksum(changed)) for changed in [tensor, *changes]}
    assert len(sums) == 1 + len(changes)
