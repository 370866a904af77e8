"""Every operation of DataProto against a model made of plain lists of rows."""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl import DataProto
from verl.protocol import (
    collate_fn,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)

Rows = list[dict[str, Any]]
DTYPES = [torch.int64, torch.int32, torch.float32, torch.bfloat16, torch.bool, torch.uint8]
settings.register_profile("protocol", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("protocol")


@st.composite
def batches(draw: st.DrawFn, min_rows: int = 0, max_rows: int = 6) -> tuple[DataProto, Rows]:
    """Draw a batch, and the same as a list of rows."""
    num_rows = draw(st.integers(min_rows, max_rows))
    rows: Rows = [{} for _ in range(num_rows)]
    tensors: dict[str, torch.Tensor] = {}
    arrays: dict[str, np.ndarray] = {}
    for column in range(draw(st.integers(1, 3))):
        dtype = draw(st.sampled_from(DTYPES))
        width = draw(st.sampled_from([(), (1,), (4,), (2, 2)]))
        top = 1 if dtype == torch.bool else 100
        size = num_rows * int(np.prod(width))
        values = draw(st.lists(st.integers(0, top), min_size=size, max_size=size))
        tensors[f"t{column}"] = torch.tensor(values, dtype=torch.int64).to(dtype).reshape(num_rows, *width)
    objects = draw(
        st.lists(
            st.one_of(st.text(max_size=3), st.lists(st.integers(), max_size=2)), min_size=num_rows, max_size=num_rows
        )
    )
    arrays["o"] = np.fromiter(objects, dtype=object, count=num_rows)
    arrays["n"] = np.arange(num_rows * 2).reshape(num_rows, 2)
    for number, row in enumerate(rows):
        row.update({key: value[number].tolist() for key, value in tensors.items()})
        row.update({"o": objects[number], "n": arrays["n"][number].tolist()})
    return DataProto.from_dict(tensors, arrays, meta_info={"k": 1}), rows


def to_rows(data: DataProto) -> Rows:
    """Read a batch back as a list of rows."""
    rows: Rows = []
    for number in range(len(data)):
        row = {key: value[number].tolist() for key, value in data.batch.items()} if data.batch is not None else {}
        for key, value in data.non_tensor_batch.items():
            row[key] = value[number].tolist() if isinstance(value[number], np.ndarray) else value[number]
        rows.append(row)
    return rows


BATCH = batches()
FULL = batches(min_rows=1)
INDEX = st.one_of(st.none(), st.integers(-8, 8))


@given(BATCH, INDEX, INDEX, st.sampled_from([None, 1, 2, -1, -2]))
def test_slice(pair: tuple[DataProto, Rows], start: int | None, stop: int | None, step: int | None) -> None:
    data, rows = pair
    assert to_rows(data[start:stop:step]) == rows[start:stop:step]


@given(FULL, st.data())
def test_select_rows(pair: tuple[DataProto, Rows], draw: st.DataObject) -> None:
    data, rows = pair
    index = draw.draw(st.lists(st.integers(-len(rows), len(rows) - 1), max_size=8))
    mask = draw.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
    expected, masked = [rows[i] for i in index], [row for row, keep in zip(rows, mask, strict=True) if keep]
    for form in (list, lambda v: np.array(v, dtype=int), lambda v: torch.tensor(v, dtype=torch.long)):
        assert to_rows(data[form(index)]) == expected
    for form in (list, np.array, torch.tensor):
        assert to_rows(data.select_idxs(form(mask))) == masked
    for i in index:
        item = data[i]
        assert {key: value.tolist() for key, value in item.batch.items()}.items() <= rows[i].items()
        assert item.non_tensor_batch["o"] == rows[i]["o"] and item.meta_info is data.meta_info
    with pytest.raises(IndexError):
        data[[len(rows)]]
    with pytest.raises(IndexError):
        data[len(rows)]


@given(FULL, st.data())
def test_reorder_and_padding(pair: tuple[DataProto, Rows], draw: st.DataObject) -> None:
    data, rows = pair
    order = draw.draw(st.permutations(range(len(rows))))
    data.reorder(torch.tensor(order))
    rows = [rows[i] for i in order]
    assert to_rows(data) == rows
    size, candidate = draw.draw(st.integers(0, 3)), draw.draw(st.sampled_from(["", "first"]))
    data.padding(size, candidate)
    assert to_rows(data) == rows + [rows[0] if candidate else rows[-1]] * size


@given(BATCH, st.integers(0, 3), st.booleans(), st.data())
def test_repeat(pair: tuple[DataProto, Rows], times: int, interleave: bool, draw: st.DataObject) -> None:
    data, rows = pair
    expected = [row for row in rows for _ in range(times)] if interleave else rows * times
    assert to_rows(data.repeat(times, interleave)) == expected
    counts = draw.draw(st.lists(st.integers(0, 3), min_size=len(rows), max_size=len(rows)))
    expected = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
    for form in (list, tuple, lambda v: np.array(v, dtype=int), lambda v: torch.tensor(v, dtype=torch.long)):
        assert to_rows(data.sample_level_repeat(form(counts))) == expected


@given(BATCH, st.integers(1, 4))
def test_chunk_split_and_concat(pair: tuple[DataProto, Rows], parts: int) -> None:
    data, rows = pair
    split = data.split(parts)
    assert [to_rows(part) for part in split] == [rows[i : i + parts] for i in range(0, len(rows), parts)]
    if split:
        assert to_rows(DataProto.concat(split)) == rows
    if len(rows) % parts:
        with pytest.raises(AssertionError):
            data.chunk(parts)
        data.meta_info["_verl_auto_padding"] = True
    chunks = data.chunk(parts)
    sizes = [len(chunk) for chunk in chunks]
    assert len(sizes) == parts and max(sizes) - min(sizes) <= 1
    assert [row for chunk in chunks for row in to_rows(chunk)] == rows


@given(BATCH, st.integers(1, 5))
def test_pad_and_unpad(pair: tuple[DataProto, Rows], divisor: int) -> None:
    data, rows = pair
    padded, count = pad_dataproto_to_divisor(data, divisor)
    assert count == (-len(rows) % divisor if rows else 0)
    assert to_rows(padded) == rows + [rows[i % len(rows)] for i in range(count)]
    assert to_rows(unpad_dataproto(padded, count)) == rows


@given(FULL, st.sampled_from([1, 2, 3]), st.booleans(), st.integers(0, 5))
def test_make_iterator(pair: tuple[DataProto, Rows], size: int, shuffle: bool, seed: int) -> None:
    data, rows = pair
    if len(rows) % size:
        with pytest.raises(AssertionError):
            data.make_iterator(size, 1)
        return

    def epochs() -> list[Rows]:
        batches = list(data.make_iterator(size, 2, seed=seed, dataloader_kwargs={"shuffle": shuffle}))
        assert all(len(batch) == size and batch.meta_info == data.meta_info for batch in batches)
        flat = [row for batch in batches for row in to_rows(batch)]
        return [flat[: len(rows)], flat[len(rows) :]]

    first = epochs()
    assert first == epochs()
    for epoch in first:
        assert sorted(map(repr, epoch)) == sorted(map(repr, rows)) if shuffle else epoch == rows


@given(BATCH, st.data())
def test_columns(pair: tuple[DataProto, Rows], draw: st.DataObject) -> None:
    data, rows = pair
    keys = draw.draw(st.lists(st.sampled_from(sorted(data.batch.keys())), unique=True))
    arrays = draw.draw(st.lists(st.sampled_from(["o", "n"]), unique=True))
    picked = data.select(keys, arrays)
    kept = {*keys, *arrays}
    assert len(picked) == len(rows)
    assert to_rows(picked) == [{key: row[key] for key in kept} for row in rows]
    popped = data.pop(keys, arrays, ["k"])
    rest = [{key: value for key, value in row.items() if key not in kept} for row in rows]
    assert to_rows(data) == rest and data.meta_info == {} and popped.meta_info == {"k": 1}
    if kept:
        assert to_rows(popped) == [{key: row[key] for key in kept} for row in rows]
        assert to_rows(data.union(popped)) == rows
    for key in list(data.batch.keys()):
        data.rename(key, f"new_{key}")
    renamed = [{(f"new_{k}" if k.startswith("t") else k): v for k, v in row.items()} for row in rows]
    assert to_rows(data) == renamed


@given(BATCH, st.booleans())
def test_pickle_and_tensordict_round_trip(pair: tuple[DataProto, Rows], out_of_band: bool) -> None:
    data, rows = pair
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append if out_of_band else None)
    back = pickle.loads(text, buffers=[bytes(buffer.raw()) for buffer in buffers])
    assert to_rows(back) == rows and back.meta_info == data.meta_info
    for key, value in data.batch.items():
        assert back.batch[key].dtype == value.dtype and back.batch[key].shape == value.shape
        back.batch[key].zero_()
    assert back.non_tensor_batch["n"].flags.writeable
    assert to_rows(data) == rows
    if rows:
        assert to_rows(DataProto.from_tensordict(data.to_tensordict())) == rows


@given(FULL, st.integers(1, 4))
def test_fold_collate_and_unfold(pair: tuple[DataProto, Rows], size: int) -> None:
    data, rows = pair
    assert to_rows(collate_fn(list(data))) == rows
    if len(rows) % size:
        with pytest.raises(AssertionError):
            fold_batch_dim(data, size)
        return
    folded = fold_batch_dim(data, size)
    inner = len(rows) // size
    for key in data.batch.keys():
        expected = [[row[key] for row in rows[i * inner : (i + 1) * inner]] for i in range(size)]
        assert folded.batch[key].tolist() == expected
    assert to_rows(unfold_batch_dim(folded)) == rows


@given(FULL, st.sampled_from([1, 2, 4]))
def test_unfold_column_chunks(pair: tuple[DataProto, Rows], parts: int) -> None:
    data, rows = pair
    wide = [key for key, value in data.batch.items() if value.dim() > 1 and value.shape[1] % parts == 0]
    expected = []
    for row in rows:
        for part in range(parts):
            piece = dict(row)
            for key in wide:
                width = len(row[key]) // parts
                piece[key] = row[key][part * width : (part + 1) * width]
            expected.append(piece)
    assert to_rows(data.unfold_column_chunks(parts, wide)) == expected
