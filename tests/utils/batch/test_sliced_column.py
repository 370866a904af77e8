"""Large columns in slices: they arrive as they were sent, whichever way the pickle takes."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from verl.utils.batch import sliced_column
from verl.utils.batch.sliced_column import SlicedColumn, take_slice

SLICE = 64  # bytes: 8 values of int64


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut columns of a few values."""
    monkeypatch.setattr(sliced_column, "SLICE_BYTES", SLICE)


def _columns() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    # The slices of "mixed" need one, two, four and eight bytes per value, and the last is shorter.
    mixed = torch.cat([torch.arange(8), torch.arange(8) - 2**15, torch.arange(8) * 2**20, torch.arange(5) * 2**50])
    return {
        "mixed": mixed.unsqueeze(-1),
        "extremes": torch.tensor([torch.iinfo(torch.int64).min, torch.iinfo(torch.int64).max, 0]),
        "float": torch.randn(7, 5, generator=generator),
        "half": torch.randn(3, 50, generator=generator).bfloat16(),
        "bool": torch.arange(100) % 3 == 0,
        "complex": torch.randn(20, dtype=torch.complex64, generator=generator),
        "strided": torch.arange(60).reshape(6, 10).T[1:],
        "gradient": torch.ones(30, requires_grad=True),
        "scalar": torch.tensor(5.0),
    }


def _out_of_band(column: SlicedColumn, kind: Callable[[Any], Any]) -> SlicedColumn:
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(column, protocol=5, buffer_callback=buffers.append)
    received: SlicedColumn = pickle.loads(text, buffers=[kind(buffer) for buffer in buffers])
    return received


def _in_python(column: SlicedColumn) -> SlicedColumn:
    file = io.BytesIO()
    pickle._Pickler(file, protocol=5).dump(column)  # type: ignore[attr-defined]
    received: SlicedColumn = pickle._Unpickler(io.BytesIO(file.getvalue())).load()  # type: ignore[attr-defined]
    return received


WAYS: dict[str, Callable[[SlicedColumn], SlicedColumn]] = {
    "protocol 5": lambda column: pickle.loads(pickle.dumps(column, protocol=5)),
    "protocol 4": lambda column: pickle.loads(pickle.dumps(column, protocol=4)),
    "protocol 2": lambda column: pickle.loads(pickle.dumps(column, protocol=2)),
    "pickle in Python": _in_python,
    "read-only buffers": lambda column: _out_of_band(column, lambda buffer: memoryview(buffer).toreadonly()),
    "bytes": lambda column: _out_of_band(column, bytes),
    "byte arrays": lambda column: _out_of_band(column, bytearray),
    "the buffers that were sent": lambda column: _out_of_band(column, lambda buffer: buffer),
    "twice": lambda column: WAYS["protocol 5"](WAYS["read-only buffers"](column)),
    "twice, in another order": lambda column: WAYS["read-only buffers"](WAYS["protocol 5"](column)),
    "a deep copy": copy.deepcopy,
}


@pytest.mark.parametrize("way", WAYS)
def test_a_column_arrives_as_it_was_sent(way: str) -> None:
    for name, sent in _columns().items():
        got = WAYS[way](SlicedColumn.of(sent)).tensor()
        assert got.dtype == sent.dtype and got.shape == sent.shape and torch.equal(got, sent), name
        before = sent.detach().clone()
        got.detach().zero_()  # the receiver owns it
        assert torch.equal(sent, before), name


def test_slices_are_narrow_or_views() -> None:
    columns = _columns()
    slices = SlicedColumn.of(columns["mixed"]).slices
    assert [(name, content.nbytes) for name, content in slices] == [
        ("uint8", 8), ("int16", 16), ("int32", 32), ("int64", 40)
    ]  # fmt: skip
    address = SlicedColumn.of(columns["float"]).slices[1][1].ctypes.data
    assert address == columns["float"].data_ptr() + SLICE


def test_memory_of_a_slice_is_given_back_before_the_next() -> None:
    """Read with the unpickler in Python, which shows what it keeps."""
    unpickler = pickle._Unpickler(io.BytesIO(pickle.dumps(SlicedColumn.of(torch.randn(1000)), protocol=5)))  # type: ignore[attr-defined]
    unpickler.load()
    kept = [value for value in unpickler.memo.values() if isinstance(value, bytearray)]
    assert len(kept) > 1000 * 4 // SLICE and sum(map(len, kept)) <= 1  # the probe has one byte


def test_buffers_of_the_caller_keep_their_values() -> None:
    column = SlicedColumn.of(torch.arange(40).double())
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(column, protocol=5, buffer_callback=buffers.append)
    received = [bytearray(buffer) for buffer in buffers]
    for _ in range(2):
        assert pickle.loads(text, buffers=received).tensor().tolist() == list(range(40))

    # Some transports send small buffers, such as the probe, inside the pickle.
    large: list[bytes] = []

    def keep_large(buffer: pickle.PickleBuffer) -> bool:
        content = bytes(buffer)
        if len(content) < SLICE:
            return True
        large.append(content)
        return False

    text = pickle.dumps(column, protocol=5, buffer_callback=keep_large)
    frames = [bytearray(content) for content in large]
    for _ in range(2):
        assert pickle.loads(text, buffers=map(memoryview, frames)).tensor().tolist() == list(range(40))


@pytest.mark.parametrize("way", ["inside", "out of band"])
def test_a_damaged_column_is_refused(way: str) -> None:
    values = np.arange(4, dtype=np.float32).view(np.uint8)
    column = SlicedColumn("float32", (2, 3), in_band=way == "inside")
    take_slice(column, "float32", values)
    with pytest.raises(ValueError, match=r"4 values have arrived of a tensor of shape \(2, 3\)"):
        column.__setstate__([None])
    late = SlicedColumn("float32", (2, 3), in_band=True)
    for name, message in (("float64", "'float64' are sent for a tensor of torch.float32"), ("abs", "'abs' are sent")):
        with pytest.raises(ValueError, match=message):
            take_slice(late, name, values)
    take_slice(late, "float32", values)
    with pytest.raises(ValueError, match="8 values are sent for a tensor of 6"):
        take_slice(late, "float32", values)
