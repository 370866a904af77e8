"""What a received batch owns: compact columns, copies at the first use, and joins straight from the buffers."""

import pickle
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl import DataProto
from verl.protocol import DataProtoFuture, delayed_copies, deserialize_tensordict, serialize_tensordict
from verl.utils.batch import serialization
from verl.utils.numerics import host_memory

RANGES = {"uint8": (0, 255), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1)}


@pytest.fixture(autouse=True)
def small_columns_are_large(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Treat columns of a few bytes as large, and unexpected warnings (of read-only memory) as errors."""
    monkeypatch.setattr(serialization, "NARROW_BYTES", 1)
    monkeypatch.setattr(host_memory, "LARGE_BYTES", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def _send(data: Any) -> tuple[bytes, list[bytes]]:
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data, protocol=5, buffer_callback=buffers.append)
    return text, [bytes(buffer) for buffer in buffers]


def _receive(sent: tuple[bytes, list[bytes]]) -> Any:
    return pickle.loads(sent[0], buffers=sent[1])


def _batch(rows: int = 6) -> DataProto:
    tensors = {
        "ids": torch.arange(rows * 4).reshape(rows, 4) * 9000,
        "mask": torch.arange(rows * 4).reshape(rows, 4) % 2,
        "x": torch.rand(rows, 3, generator=torch.Generator().manual_seed(0)),
        "half": torch.arange(rows).bfloat16(),
        "empty": torch.zeros(rows, 0, dtype=torch.int64),
    }
    return DataProto.from_dict(tensors, {"id": np.arange(rows), "o": [{"t": torch.ones(2)}] * rows}, {"k": 1})


def _equal(a: DataProto, b: DataProto) -> bool:
    keys = list(a.batch.keys())
    assert keys == list(b.batch.keys()) and a.meta_info == b.meta_info
    assert all(a.batch[key].dtype == b.batch[key].dtype for key in keys)
    assert a.non_tensor_batch["id"].tolist() == b.non_tensor_batch["id"].tolist()
    return all(torch.equal(a.batch[key], b.batch[key]) for key in keys)


@pytest.mark.parametrize("kind", RANGES)
def test_integers_travel_in_the_smallest_type_that_holds_them(kind: str) -> None:
    low, high = RANGES[kind]
    for values in ([low, high], [low, 0], [high, high]):
        column = torch.tensor([values, [0, 1]])
        state = serialize_tensordict(TensorDict({"x": column}, [2]), compact=True)
        assert state[2]["x"][0] == "narrow"
        assert deserialize_tensordict(state)["x"].tolist() == column.tolist()
    assert serialize_tensordict(TensorDict({"x": torch.tensor([low, high])}, [2]), True)[2]["x"][1][0] == kind
    wider = serialize_tensordict(TensorDict({"x": torch.tensor([low, high + 1])}, [2]), compact=True)
    assert deserialize_tensordict(wider)["x"].tolist() == [low, high + 1]
    assert len(wider[2]["x"]) == (3 if kind == "int32" else 2) or wider[2]["x"][1][0] != kind


def test_other_columns_travel_as_they_are(tmp_path: Path) -> None:
    jagged = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    tensors = {"j": jagged, "i32": torch.ones(2, dtype=torch.int32), "big": torch.tensor([2**40, 1])}
    state = serialize_tensordict(TensorDict(tensors, [2]), compact=True)
    assert [state[2][key][0] for key in tensors] == ["jagged", "int32", "int64"]
    # The established form has triples only.
    assert serialize_tensordict(_batch().batch)[2]["ids"][0] == "int64"
    strided = torch.arange(12).reshape(3, 4).T[1:]
    data = DataProto.from_dict({"x": strided})
    data.save_to_disk(tmp_path / "batch.pkl")
    assert DataProto.load_from_disk(tmp_path / "batch.pkl").batch["x"].tolist() == strided.tolist()
    assert pickle.loads(pickle.dumps(data)).batch["x"].tolist() == strided.tolist()


@pytest.mark.parametrize("delayed", [False, True])
def test_the_receiver_owns_its_tensors(delayed: bool) -> None:
    data = _batch()
    sent = _send(data)
    first, second = _receive(sent), _receive(sent)
    if delayed:
        with delayed_copies():
            first = _receive(sent)
            assert first._not_copied() is not None
            first.batch["ids"] += 1  # the first use copies
            second = _receive(sent)
        assert second._not_copied() is None  # the end of the block copies
    else:
        first.batch["ids"] += 1
    first.batch["x"].zero_()
    first.non_tensor_batch["id"] += 5
    assert _equal(second, data) and _equal(_receive(sent), data)
    assert first.batch["ids"].tolist() == (data.batch["ids"] + 1).tolist()
    with pytest.raises(AttributeError, match="no attribute 'bach'"):
        _ = second.bach


def test_a_file_holds_a_batch(tmp_path: Path) -> None:
    data = _batch()
    data.save_to_disk(tmp_path / "batch.pkl")
    assert _equal(DataProto.load_from_disk(tmp_path / "batch.pkl"), data)


def test_delayed_batches_answer_like_others() -> None:
    data = _batch()
    sent = _send(data)
    with delayed_copies():
        for use in (
            lambda got: len(got),
            lambda got: got[1:3].batch["ids"].tolist(),
            lambda got: [part.batch["x"].tolist() for part in got.chunk(3)],
            lambda got: got.select(["mask"]).batch["mask"].tolist(),
            lambda got: got.union(DataProto.from_dict({"new": torch.ones(6)})).batch["new"].tolist(),
            lambda got: got.get_data_info(),
            lambda got: pickle.loads(pickle.dumps(got)).batch["ids"].tolist(),
            lambda got: _receive(_send(got)).batch["half"].tolist(),
        ):
            assert use(_receive(sent)) == use(_batch())
        replaced = _receive(sent)
        replaced.batch = None
        assert replaced.batch is None and replaced._not_copied() is None
    with delayed_copies(), pytest.raises(KeyError):
        raise KeyError  # the block leaves nothing behind
    assert _receive(sent)._not_copied() is None


def test_parts_are_joined_from_their_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    data = _batch()
    parts = [_send(part) for part in data.chunk(3)]
    copies: list[int] = []
    copy = serialization.deserialize_tensordict
    monkeypatch.setattr(serialization, "deserialize_tensordict", lambda arr: (copies.append(1), copy(arr))[1])
    with delayed_copies():
        joined = DataProto.concat([_receive(part) for part in parts])
    assert _equal(joined, data) and not copies
    future = DataProtoFuture(DataProto.concat, ["a", "b"], wait_fn=lambda refs: [_receive(part) for part in parts])
    assert _equal(future.get(), data) and not copies
    joined.batch["ids"][0] = -1
    assert _equal(DataProto.concat([_receive(part) for part in parts]), data) and len(copies) == 3


def test_a_call_of_workers_returns_tensors_that_the_caller_owns(monkeypatch: pytest.MonkeyPatch) -> None:
    func_generator = pytest.importorskip("verl.single_controller.ray.worker_group").func_generator
    data = _batch()
    parts = [_send(part) for part in data.chunk(3)]
    copies: list[int] = []
    copy = serialization.deserialize_tensordict
    monkeypatch.setattr(serialization, "deserialize_tensordict", lambda arr: (copies.append(1), copy(arr))[1])
    # Ray unpickles results in the thread that waits for them.
    group = SimpleNamespace(wait=lambda started, name: [_receive(part) for part in started])

    def call(collect: Any) -> Any:
        return func_generator(group, "m", lambda _: ((), {}), collect, lambda name: parts, True)()

    assert _equal(call(lambda _, outputs: DataProto.concat(outputs)), data) and not copies
    outputs = call(lambda _, outputs: outputs)
    assert len(copies) == 3 and all(output._not_copied() is None for output in outputs)
    assert _equal(call(lambda _, outputs: {"all": outputs})["all"][1], data[2:4])
    assert _receive(parts[0])._not_copied() is None


def test_parts_that_do_not_fit_are_refused_as_usual() -> None:
    with delayed_copies():
        for other, message in (
            (DataProto.from_dict({"y": torch.ones(2)}), "differ in the keys"),
            (DataProto.from_dict({"x": torch.ones(2, 3)}), "'x' differ"),
            (DataProto.from_dict({"x": torch.ones(2, dtype=torch.float64)}), "'x' differ"),
            (DataProto(non_tensor_batch={"n": np.arange(2)}), "differ in the keys"),
        ):
            one, two = (_receive(_send(part)) for part in (DataProto.from_dict({"x": torch.ones(2)}), other))
            with pytest.raises(AssertionError, match=message):
                DataProto.concat([one, two])
        jagged = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
        twice = DataProto.concat([_receive(_send(DataProto.from_dict({"j": jagged}))) for _ in range(2)])
        assert [row.tolist() for row in twice.batch["j"].unbind()] == [[0, 1], [0, 1, 2]] * 2
        # One part has wide numbers, the other narrow ones.
        mixed = [DataProto.from_dict({"x": torch.tensor(values)}) for values in ([1, 2**40], [3, -4])]
        assert DataProto.concat([_receive(_send(part)) for part in mixed]).batch["x"].tolist() == [1, 2**40, 3, -4]
        alone = DataProto.concat([_receive(_send(mixed[1]))])
    assert alone._not_copied() is None and alone.batch["x"].tolist() == [3, -4]


@pytest.mark.parametrize(
    "damage", [("float64", (2, 3)), ("int32", (2, 3)), ("abs", (2, 3)), ("float32", (3, 3)), ("float32", (1, 3))]
)
def test_a_damaged_column_is_refused(damage: tuple[str, tuple[int, ...]]) -> None:
    good = serialization.serialize_single_tensor(torch.ones(2, 3))
    with pytest.raises(ValueError, match="are sent for a tensor of torch.float32"):
        serialization._write(torch.empty(damage[1]), (damage[0], damage[1], good[2]))


def test_rows_in_memory_of_the_host() -> None:
    data = _batch()
    order = torch.tensor([5, 0, 0, 3])
    assert torch.equal(data[order].batch["ids"], data.batch["ids"][order])
    assert torch.equal(DataProto.concat([data, data[:2]]).batch["x"], torch.cat([data.batch["x"], data.batch["x"][:2]]))
    leaf = torch.ones(3, 2, requires_grad=True)
    grown = DataProto.concat([DataProto.from_dict({"x": leaf}), DataProto.from_dict({"x": leaf})])[[0, 5]]
    grown.batch["x"].sum().backward()
    assert leaf.grad is not None and leaf.grad.tolist() == [[1, 1], [0, 0], [1, 1]]
