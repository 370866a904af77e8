"""Columns by reference: every verb of DataProto gives what it gives for plain columns, and moves no row."""

import copy
import io
import logging
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from verl import DataProto
from verl.protocol import fold_batch_dim, lazy, pad_dataproto_to_divisor, unfold_batch_dim, unpad_dataproto
from verl.protocol.lazy import LazyTensor, by_reference, fetched, is_lazy, lazy_columns, take_touched
from verl.utils.observe.digest import digest_of_rows, row_digests, tensor_digest


def plain_batch(rows: int = 6, seed: int = 0) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        "ids": torch.randint(0, 99, (rows, 5), generator=generator),
        "log_probs": torch.randn(rows, 4, generator=generator),
        "half": torch.randn(rows, 2, 3, generator=generator).to(torch.bfloat16),
        "mask": torch.rand(rows, 4, generator=generator) > 0.5,
        "seed": torch.arange(rows),
    }
    return DataProto.from_dict(tensors, {"uid": np.array([f"u{row}" for row in range(rows)], dtype=object)}, {"k": 1})


def stored(data: DataProto) -> DataProto:
    """Put columns into blocks of two or three rows."""
    return by_reference(data, put=copy.deepcopy, block_bytes=200)


def assert_same(lazy: DataProto, plain: DataProto) -> None:
    """Compare all values."""
    values = fetched(lazy)
    assert values.batch.keys() == plain.batch.keys()
    assert len(lazy) == len(plain)
    for name, value in plain.batch.items():
        assert not isinstance(values.batch[name], LazyTensor)
        assert values.batch[name].dtype == value.dtype
        assert values.batch[name].shape == value.shape
        assert torch.equal(values.batch[name], value), name
    for name, value in plain.non_tensor_batch.items():
        assert values.non_tensor_batch[name].tolist() == value.tolist()
    assert values.meta_info == plain.meta_info


Verb = Callable[[DataProto, "st.DataObject"], DataProto]


def reordered(data: DataProto, draw: Any) -> DataProto:
    data.reorder(torch.tensor(draw(st.permutations(range(len(data)))), dtype=torch.int64))
    return data


def padded(data: DataProto, draw: Any) -> DataProto:
    data.padding(draw(st.integers(0, 2)), draw(st.sampled_from(["first", "last"])))
    return data


def popped(data: DataProto, draw: Any) -> DataProto:
    part = data.pop(["ids"])
    return data.union(part)


def renamed(data: DataProto, draw: Any) -> DataProto:
    return data.rename(["ids", "log_probs"], ["log_probs", "ids"]).rename(["ids", "log_probs"], ["log_probs", "ids"])


VERBS: dict[str, Callable[[DataProto, Any], DataProto]] = {
    "select": lambda data, draw: data.select(),
    "copy": lambda data, draw: copy.copy(data),
    "pop and union": popped,
    "union with itself": lambda data, draw: data.select().union(data.select()),
    "rename": renamed,
    "reorder": reordered,
    "repeat": lambda data, draw: data.repeat(draw(st.integers(1, 2)), draw(st.booleans())),
    "sample_level_repeat": lambda data, draw: data.sample_level_repeat([1] * len(data)),
    "slice": lambda data, draw: data[draw(st.integers(0, 2)) : len(data) - draw(st.integers(0, 1))],
    "slice with step": lambda data, draw: data.slice(0, None, 2),
    "slice backwards": lambda data, draw: data.slice(None, None, -1),
    "mask": lambda data, draw: data[torch.tensor([row % 2 == 0 for row in range(len(data))])],
    "list": lambda data, draw: data.select_idxs([*range(len(data)), -1]),
    "chunk and concat": lambda data, draw: DataProto.concat(data.chunk(len(data))),
    "split and concat": lambda data, draw: DataProto.concat(data.split(2)),
    "pad and unpad": lambda data, draw: unpad_dataproto(*pad_dataproto_to_divisor(data, 4)),
    "pad": lambda data, draw: pad_dataproto_to_divisor(data, 4)[0],
    "padding": padded,
    "mini-batches": lambda data, draw: DataProto.concat(
        list(data.make_iterator(1, 1, seed=3, dataloader_kwargs={"shuffle": True}))
    ),
}


class Drawn:
    """Draws, and keeps what it has drawn."""

    def __init__(self, data: Any, kept: list[Any]) -> None:
        self.data, self.kept = data, kept

    def __call__(self, strategy: Any) -> Any:
        self.kept.append(self.data.draw(strategy))
        return self.kept[-1]


class Repeated:
    """Gives the same answers again."""

    def __init__(self, kept: list[Any]) -> None:
        self.kept = kept

    def __call__(self, strategy: Any) -> Any:
        return self.kept.pop(0)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(st.data())
def test_chains_of_verbs_move_addresses_only(data):
    plain = plain_batch(data.draw(st.integers(1, 7)), seed=1)
    lazy = stored(plain)
    take_touched()
    for _ in range(data.draw(st.integers(1, 5))):
        name = data.draw(st.sampled_from(sorted(VERBS)))
        answers: list[Any] = []
        plain, lazy = (
            VERBS[name](each, source)
            for each, source in zip((plain, lazy), (Drawn(data, answers), Repeated(answers)), strict=True)
        )
        if not len(plain):
            break
        assert set(lazy_columns(lazy)) == {"ids", "log_probs", "half", "mask"}
    assert not take_touched()
    assert torch.equal(lazy.batch["ids"].sum(-1), plain.batch["ids"].sum(-1))
    assert torch.equal(lazy.batch["mask"].sum(-1, keepdim=True), plain.batch["mask"].sum(-1, keepdim=True))
    for name, column in lazy_columns(lazy).items():
        digest = digest_of_rows(column.dtype, column.shape, column.places.digests)
        assert digest == tensor_digest(plain.batch[name])
    assert not take_touched()
    assert_same(lazy, plain)


def test_a_touched_column_is_read_counted_and_said_once(caplog):
    plain, lazy = plain_batch(), stored(plain_batch())
    take_touched()
    with caplog.at_level(logging.WARNING, logger="verl.protocol.lazy"):
        assert torch.equal(lazy.batch["log_probs"] * 2, plain.batch["log_probs"] * 2)
        assert torch.equal(lazy.batch["log_probs"].exp(), plain.batch["log_probs"].exp())
    assert take_touched() == {"log_probs": 6 * 4 * 4}
    assert not take_touched()
    (record,) = caplog.records
    text = record.getMessage()
    assert "'log_probs'" in text and "96 bytes" in text and "test_lazy.py:" in text, text


def test_one_row_and_chosen_rows_read_their_own_bytes():
    plain, lazy = plain_batch(), stored(plain_batch())
    take_touched()
    assert torch.equal(lazy[2].batch["ids"], plain[2].batch["ids"])
    assert torch.equal(lazy.batch["ids"][-1], plain.batch["ids"][-1])
    chosen = lazy.batch["ids"][[4, 1]]
    assert chosen.tolist() == plain.batch["ids"][[4, 1]].tolist()
    assert sum(take_touched().values()) >= 4 * 5 * 8
    assert not lazy.batch["ids"].is_known


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x[:, -2:],
        lambda x: x[:, -2:][1:, :1],
        lambda x: x[:, ::2],
        lambda x: x[:, 1:3].sum(-1),
        lambda x: torch.cat([x[:2, 1:], x[2:, 1:]])[[3, 0]],
        lambda x: torch.cat([x[:, 1:3], x[:, 2:4]]),
        lambda x: x[:, 9:],
        lambda x: torch.equal(x[:, 1:], x[:, 1:]),
        lambda x: x.sum(),
        lambda x: x.sum(0),
        lambda x: x.sum(-1, dtype=torch.float64),
        lambda x: x.float().mean(),
        lambda x: x.any(-1),
        lambda x: x == 3,
        lambda x: torch.where(x > 1, x, 0),
        lambda x: torch.cat([x, x], -1),
        lambda x: torch.cat([x, torch.ones(1, 5, dtype=x.dtype)]),
        lambda x: torch.stack([x, x]),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.clone(),
        lambda x: x.detach(),
        lambda x: x.t(),
        lambda x: x.reshape(-1),
        lambda x: x.to(torch.float64),
        lambda x: x.repeat_interleave(2, dim=0),
        lambda x: x[torch.tensor([[0, 1]])],
        lambda x: x[x > 50],
        lambda x: x[1, 2].item(),
        lambda x: [row.tolist() for row in x],
        lambda x: x.expand(2, *x.shape),
        lambda x: torch.zeros_like(x),
        lambda x: x.new_ones(3),
        lambda x: torch.isin(x, torch.tensor([1, 2, 3])),
        lambda x: copy.deepcopy(x),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.equal(x, x + 0),
        lambda x: torch.nn.functional.pad(x, (1, 0)),
    ],
)
def test_operations_of_torch(operation):
    plain, lazy = plain_batch(), stored(plain_batch())
    expected, found = operation(plain.batch["ids"]), operation(lazy.batch["ids"])
    assert np.asarray(found).tolist() == np.asarray(expected).tolist()


def test_indices_of_other_types_with_the_same_bytes_choose_their_own_rows():
    plain = plain_batch()
    column = stored(plain).batch["ids"]
    indices = [torch.tensor([1]), torch.tensor([1, 0], dtype=torch.int32), torch.tensor([False, True] * 3)]
    assert indices[0].numpy().tobytes() == indices[1].numpy().tobytes()
    for index in indices:
        assert torch.equal(column[index].fetched(), plain.batch["ids"][index])


def test_an_index_out_of_range_is_refused_as_usual():
    lazy = stored(plain_batch())
    with pytest.raises(IndexError):
        lazy[9]
    with pytest.raises(IndexError):
        lazy.select_idxs([9])
    with pytest.raises(IndexError):
        lazy.batch["ids"][torch.tensor([9])]


@pytest.mark.parametrize(
    "write",
    [
        lambda x: x.__setitem__(0, 7),
        lambda x: x.__setitem__((slice(None), -1), 7),
        lambda x: x.add_(1),
        lambda x: x[1:3].mul_(2),
        lambda x: x[:, 1:][2:].mul_(2),
        lambda x: x[1:3].__setitem__(0, 7),
        lambda x: x[2:][1:].fill_(5),
        lambda x: x.detach().zero_(),
        lambda x: x.copy_(torch.ones(6, 5, dtype=torch.int64)),
        lambda x: torch.add(x, x, out=x),
        lambda x: x.numpy().__setitem__(0, 3),
    ],
)
def test_writing_changes_the_column_and_what_it_is_a_slice_of(write):
    plain, lazy = plain_batch(), stored(plain_batch())
    head = lazy[:4]
    write(plain.batch["ids"])
    write(lazy.batch["ids"])
    assert_same(lazy, plain)
    assert_same(head, plain[:4])
    assert_same(lazy.select_idxs([3, 0]), plain.select_idxs([3, 0]))
    assert_same(DataProto.concat([lazy, lazy]), DataProto.concat([plain, plain]))
    again = by_reference(lazy, put=copy.deepcopy)
    assert not again.batch["ids"].is_written
    assert_same(again, plain)


def test_in_place_through_a_batch_keeps_the_column_in_the_batch():
    plain, lazy = plain_batch(), stored(plain_batch())
    for data in (plain, lazy):
        data.batch["log_probs"] += 1
        data.batch["log_probs"][data.batch["mask"]] = 0
    assert_same(lazy, plain)


def test_pickles_and_files_hold_values(tmp_path, monkeypatch):
    plain, lazy = plain_batch(), stored(plain_batch())
    assert not is_lazy(pickle.loads(pickle.dumps(lazy)))
    assert_same(pickle.loads(pickle.dumps(lazy)), plain)
    assert_same(copy.deepcopy(stored(plain)), plain)
    stored(plain).save_to_disk(tmp_path / "batch")
    assert_same(DataProto.load_from_disk(tmp_path / "batch"), plain)
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", "torch")
    assert_same(pickle.loads(pickle.dumps(stored(plain))), plain)


class Sent(pickle.Pickler):
    """Pickles columns as Ray does: as addresses."""

    def reducer_override(self, value: Any) -> Any:
        return (lazy._column, (lazy._address(value),)) if isinstance(value, LazyTensor) else NotImplemented


def test_columns_of_the_same_rows_share_what_is_sent():
    first, second = (stored(plain_batch(6, seed)) for seed in (0, 1))
    first.union(second.rename(["ids", "log_probs", "half", "mask"], ["a", "b", "c", "d"]).select(["a", "b"]))
    first.reorder(torch.tensor([5, 0, 3, 1, 4, 2]))
    part = first.chunk(2)[1]
    part.batch["ids"] = first.chunk(2)[0].batch["ids"]  # other rows of the same blocks
    part.batch["mask"][0] = True  # written: its values are sent
    stream = io.BytesIO()
    Sent(stream, protocol=5).dump({str(name): value for name, value in part.batch.items()})
    got = pickle.loads(stream.getvalue())
    assert {name for name, value in got.items() if isinstance(value, LazyTensor)} == {
        "ids",
        "log_probs",
        "half",
        "a",
        "b",
    }
    for name, value in part.batch.items():
        assert torch.equal(fetched_values(got[name]), fetched_values(value)), name
    rows = {name: id(value.places.rows) for name, value in got.items() if isinstance(value, LazyTensor)}
    assert rows["log_probs"] == rows["half"] and rows["a"] == rows["b"] and len(set(rows.values())) == 3
    assert torch.equal(got["log_probs"].sum(-1), part.batch["log_probs"].sum(-1))
    sent = weakref.ref(part.batch["log_probs"].places.rows)
    del first, part, value
    assert sent() is None, "what was sent keeps its blocks"


def fetched_values(value: torch.Tensor) -> torch.Tensor:
    return value.fetched() if isinstance(value, LazyTensor) else value


def test_shapes_change_and_tensordicts():
    plain, lazy = plain_batch(), stored(plain_batch())
    assert_same(unfold_batch_dim(fold_batch_dim(lazy, 3)), plain)
    assert_same(DataProto.from_tensordict(lazy.to_tensordict()), DataProto.from_tensordict(plain.to_tensordict()))
    unfolded = lazy.unfold_column_chunks(2, ["log_probs"])
    assert_same(unfolded, plain.unfold_column_chunks(2, ["log_probs"]))
    assert "ids: (6, 5) (torch.int64) cpu" in lazy.get_data_info()
    assert_same(lazy.to("cpu"), plain)


def test_a_union_with_other_values_is_a_conflict():
    lazy = stored(plain_batch())
    with pytest.raises(ValueError, match="'ids' holds different values"):
        lazy.union(stored(plain_batch(seed=5)).select(["ids"], []))


def test_empty_batches_and_columns_of_numbers_stay():
    plain = plain_batch(0)
    assert not is_lazy(stored(plain))
    numbers = DataProto.from_dict({"seed": torch.arange(3)})
    assert not is_lazy(stored(numbers))
    assert not is_lazy(by_reference(DataProto(meta_info={"metrics": {}}), put=copy.deepcopy))


def test_a_block_is_read_once_and_only_if_it_holds_a_row(monkeypatch):
    lazy = stored(plain_batch())
    column = lazy.batch["ids"]
    assert len(column.places.rows.blocks) == 3
    assert len(lazy[0:2].batch["ids"].places.rows.used()[0]) == 1
    joined = DataProto.concat([lazy[0:2], lazy[1:3], stored(plain_batch(seed=9))])
    assert len(joined.batch["ids"].places.rows.blocks) == 6
    first, other = (plain_batch(seed=seed).batch["ids"] for seed in (0, 9))
    assert joined.batch["ids"].tolist() == torch.cat([first[0:2], first[1:3], other]).tolist()


def test_digests_of_rows_do_not_depend_on_where_they_lie():
    values = plain_batch().batch["half"]
    parts = np.concatenate([row_digests(values[:2]), row_digests(values[2:])])
    assert digest_of_rows(values.dtype, values.shape, parts) == tensor_digest(values)
