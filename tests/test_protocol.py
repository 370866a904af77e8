"""DataProto: errors, sharing of memory, meta_info and serialization."""

import base64
import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from verl import DataProto
from verl.protocol import (
    DataProtoConfig,
    DataProtoFuture,
    all_gather_data_proto,
    deserialize_tensordict,
    serialize_tensordict,
)
from verl.utils.device.gloo import use_one_thread
from verl.utils.py_functional import object_array


def _batch(rows: int = 6) -> DataProto:
    tensors = {"x": torch.arange(rows * 2).reshape(rows, 2), "y": torch.rand(rows)}
    return DataProto.from_dict(tensors, {"id": np.arange(rows), "text": [str(i) for i in range(rows)]}, {"k": 1})


def _pointer(data: DataProto, key: str = "x") -> int:
    return data.batch[key].data_ptr()


def test_none_is_nothing() -> None:
    """Callers give None for what they do not have."""
    empty = DataProto(batch=None, non_tensor_batch=None, meta_info=None)  # type: ignore[arg-type]
    assert len(empty) == 0 and (empty.non_tensor_batch, empty.meta_info) == ({}, {})
    rows = DataProto(_batch().batch, None)  # type: ignore[arg-type]
    assert len(rows) == 6 and rows.non_tensor_batch == {}


def test_slices_and_chunks_are_views() -> None:
    data = _batch()
    row_bytes = data.batch["x"].stride(0) * data.batch["x"].element_size()
    for parts in (data.chunk(3), data.split(2), list(data.make_iterator(2, 1))):
        assert [_pointer(part) for part in parts] == [_pointer(data) + 2 * i * row_bytes for i in range(3)]
        assert all(np.shares_memory(part.non_tensor_batch["id"], data.non_tensor_batch["id"]) for part in parts)
    assert _pointer(data[1:5]) == _pointer(data) + row_bytes
    assert _pointer(data.select(["x"])) == _pointer(data)


@pytest.mark.parametrize(
    "grow", [lambda d: DataProto.concat([d, d]), lambda d: d.repeat(2), lambda d: d.repeat(2, False)]
)
def test_growing_allocates_the_result_only(grow: Any) -> None:
    data = DataProto.from_dict({"x": torch.zeros(64, 1024)})
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        out = grow(data)
    allocated = sum(event.self_cpu_memory_usage for event in profile.key_averages() if event.self_cpu_memory_usage > 0)
    nbytes = out.batch["x"].numel() * 4
    assert nbytes <= allocated < nbytes * 1.05


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: DataProto.from_dict({"a": torch.zeros(2), "b": torch.zeros(3)}), "agree in their first dim"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, num_batch_dims=0), "num_batch_dims"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2, 2)}, {"b": [1, 2]}, num_batch_dims=2), "num_batch_dims"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": [1]}), "'b'"),
        (lambda: DataProto.from_dict({"a": torch.tensor(1)}), r"tensors\['a'\] .* got shape \(\)"),
        (lambda: DataProto.from_dict({"a": [1, 2]}), r"tensors\['a'\] .* got a list"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": "xy"}), r"non_tensors\['b'\] .* got a str"),
        (lambda: DataProto.from_dict({"a": torch.zeros(2)}, {"b": {1: 2, 3: 4}}), r"non_tensors\['b'\] .* got a dict"),
        (lambda: DataProto(batch={"a": torch.zeros(2)}), "must be a TensorDict .* got dict"),
        (lambda: DataProto.from_single_dict({"a": [1]}), "'a'"),
        (lambda: DataProto(TensorDict({}, batch_size=[2, 2])), "exactly one batch dim"),
        (lambda: DataProto(non_tensor_batch={"a": [1]}), "must be an array"),
        (lambda: _batch().chunk(4), "6 rows do not divide into 4"),
        (lambda: _batch().pop(["missing"]), "missing"),
        (lambda: _batch().rename(["x"], ["a", "b"]), "one new key per old key"),
        (lambda: _batch().rename("x", "y"), "twice"),
        (lambda: _batch().union(_batch(3)), "same number of rows"),
        (lambda: _batch().union(DataProto.from_dict({"x": torch.zeros(6, 2).long()})), "'x'"),
        (lambda: _batch().union(DataProto.from_dict(non_tensors={"id": np.zeros(6)})), "'id'"),
        (lambda: _batch().union(DataProto(meta_info={"k": 2})), "'k'"),
        (lambda: _batch().make_iterator(4, 1), "6 rows do not divide"),
        (lambda: _batch().make_iterator(2, 1, dataloader_kwargs={"workers": 2}), "'workers'.*num_workers"),
        (lambda: _batch().make_iterator(2, 1, dataloader_kwargs={"batch_size": 2}), "'batch_size'"),
        (lambda: _batch().make_iterator(2, 1, dataloader_kwargs={"shuffle": True, "sampler": [0, 1]}), "a sampler"),
        (
            lambda: DataProto.from_dict({"a": torch.zeros(4, 3), "b": torch.zeros(4, 3, 2)}, num_batch_dims=2),
            "num_batch_dims must be 1",
        ),
        (
            lambda: DataProto(non_tensor_batch={"a": object_array([[1, 2], [3]])}).unfold_column_chunks(1, ["a"]),
            "one length",
        ),
        (lambda: DataProto.concat([]), "at least one"),
        (lambda: DataProto.concat([_batch(), _batch().select(["x"])]), "part 1 and part 0 differ"),
        (lambda: DataProto.concat([DataProto(meta_info={"k": 1}), DataProto(meta_info={"k": 2})]), "'k'"),
        (lambda: _batch().sample_level_repeat([1]), "one count per row"),
        (lambda: _batch(2).sample_level_repeat([1.5, 1]), "whole and not negative"),
        (lambda: _batch(2).sample_level_repeat([1, -1]), "whole and not negative"),
        (lambda: _batch().padding(-1), "padding_size"),
        (lambda: _batch().unfold_column_chunks(3, ["x"]), "'x'"),
        (lambda: _batch().unfold_column_chunks(0, ["x"]), "n_split"),
        (lambda: setattr(DataProtoConfig, "auto_padding", "yes"), "auto_padding"),
    ],
)
def test_wrong_input_is_named(make: Any, message: str) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def test_arrays_alone_have_a_length() -> None:
    assert len(DataProto(batch=None, non_tensor_batch={"id": np.arange(3)})) == 3
    assert len(DataProto(batch=None, non_tensor_batch={})) == len(DataProto()) == 0


def test_lists_of_one_length_are_split_like_columns() -> None:
    texts = [["a1", "a2"], ["b1", "b2"], ["c1", "c2"]]
    data = DataProto.from_dict({"x": torch.arange(6).view(3, 2)}, {"text": texts, "nested": [[[1], [2, 3]]] * 3})
    out = data.unfold_column_chunks(2, split_keys=["x", "text", "nested"])
    assert out.batch["x"].tolist() == [[0], [1], [2], [3], [4], [5]]
    assert out.non_tensor_batch["text"].tolist() == [["a1"], ["a2"], ["b1"], ["b2"], ["c1"], ["c2"]]
    assert out.non_tensor_batch["nested"].tolist() == [[[1]], [[2, 3]]] * 3
    kept = data.unfold_column_chunks(2, split_keys=["x"]).non_tensor_batch["text"].tolist()
    assert kept == [row for row in texts for _ in range(2)]


def test_an_iterator_takes_the_options_of_a_data_loader() -> None:
    data = _batch()
    plain = [part.non_tensor_batch["id"].tolist() for part in data.make_iterator(2, 1)]
    options = {"num_workers": 2, "pin_memory": True, "drop_last": True, "shuffle": False, "prefetch_factor": 2}
    assert [part.non_tensor_batch["id"].tolist() for part in data.make_iterator(2, 1, None, options)] == plain
    order = [5, 0, 3, 1]
    chosen = list(data.make_iterator(2, 2, dataloader_kwargs={"sampler": order}))
    ids = data.non_tensor_batch["id"]
    assert [part.non_tensor_batch["id"].tolist() for part in chosen] == [
        ids[order[:2]].tolist(),
        ids[order[2:]].tolist(),
    ] * 2
    seeded = list(data.make_iterator(3, 1, seed=3, dataloader_kwargs={"shuffle": True}))
    generator = torch.Generator().manual_seed(3)
    drawn = list(data.make_iterator(3, 1, dataloader_kwargs={"shuffle": True, "generator": generator}))
    assert [part.non_tensor_batch["id"].tolist() for part in seeded] == [
        part.non_tensor_batch["id"].tolist() for part in drawn
    ]


def test_failed_operations_change_nothing() -> None:
    data = _batch()
    with pytest.raises(AssertionError):
        data.union(DataProto.from_dict({"new": torch.zeros(6), "y": torch.zeros(6)}, meta_info={"k": 1}))
    with pytest.raises(AssertionError):
        data.pop(["x"], ["missing"])
    assert sorted(data.batch.keys()) == ["x", "y"] and sorted(data.non_tensor_batch) == ["id", "text"]
    with pytest.raises(TypeError):
        data["x"]
    with pytest.raises(TypeError):
        data.rename(3, 4)
    with pytest.raises(KeyError, match="missing"):
        data.select(["missing"])


def test_calls_of_workers_join_whatever_they_report() -> None:
    """A loop of a fork unites with the answer of each call, and takes its metrics out of none."""
    data = _batch()
    data.union(DataProto(meta_info={"metrics": {"a": 1, "b": 1}, "timing": {"gen": 1.0}, "old_log_probs_version": 1}))
    data.union(DataProto(meta_info={"metrics": {"b": 2, "c": 3}, "timing": {"gen": 2.0}, "old_log_probs_version": 2}))
    assert data.meta_info == {
        "k": 1, "metrics": {"a": 1, "b": 2, "c": 3}, "timing": {"gen": 2.0}, "old_log_probs_version": 2
    }  # fmt: skip
    with pytest.raises(ValueError, match="'temperature'"):
        data.union(DataProto(meta_info={"temperature": 1.0})).union(DataProto(meta_info={"temperature": 0.5}))


def test_union_compares_in_depth() -> None:
    nested = np.array([{"a": [1, float("nan"), np.array([1, 2])]}, None], dtype=object)
    same = np.array([{"a": [1, float("nan"), np.array([1, 2])]}, None], dtype=object)
    nested[1], same[1] = [nested], [same]  # values that contain themselves
    data = DataProto.from_dict({"x": torch.tensor([1.0, float("nan")])}, {"o": nested})
    data.union(DataProto.from_dict({"x": torch.tensor([1.0, float("nan")])}, {"o": same}))
    with pytest.raises(AssertionError):
        data.union(DataProto.from_dict(non_tensors={"o": np.array([1, 2], dtype=object)}))


def test_copies_in_one_process_hold_values() -> None:
    data = _batch()
    data.meta_info["lengths"] = np.arange(3)
    shallow, deep = copy.copy(data), copy.deepcopy(data)
    assert _pointer(shallow) == _pointer(data) and shallow.non_tensor_batch["id"] is data.non_tensor_batch["id"]
    assert shallow.meta_info["lengths"] is data.meta_info["lengths"] and shallow.meta_info is not data.meta_info
    assert _pointer(deep) != _pointer(data)
    deep.non_tensor_batch["id"][0] = 7
    assert data.non_tensor_batch["id"][0] == 0 and deep.meta_info["lengths"].tolist() == [0, 1, 2]


def test_rename_swaps() -> None:
    data = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)}).rename(["a", "b"], ["b", "a"])
    assert data.batch["a"].item() == 1 and data.batch["b"].item() == 0


def test_concat_gathers_metrics() -> None:
    parts = [DataProto(meta_info={"metrics": value, "k": 1}) for value in ({"a": 1}, [{"a": 2}, {"a": 3}])]
    assert DataProto.concat(parts).meta_info == {"metrics": {"a": [1, 2, 3]}, "k": 1}
    with pytest.raises(AssertionError, match="must have the keys"):
        DataProto.concat([DataProto(meta_info={"metrics": {"a": 1}}), DataProto(meta_info={"metrics": {"b": 1}})])


class Child(DataProto):
    """A subclass, which operations must keep."""


def test_subclass_is_kept() -> None:
    child = Child.from_dict({"x": torch.arange(4)})
    for result in (child[:2], child.chunk(2)[0], child.repeat(2), Child.concat([child, child]), child.select(["x"])):
        assert type(result) is Child


def test_from_dict_keeps_lists_as_objects() -> None:
    data = DataProto.from_dict(non_tensors={"ids": [[1, 2], [3, 4]]})
    assert data.batch is None and len(data) == 2
    assert data.non_tensor_batch["ids"].shape == (2,) and data[1].non_tensor_batch["ids"] == [3, 4]


@pytest.mark.parametrize("method", ["numpy", "torch"])
def test_serialization_methods(method: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", method)
    jagged = torch.nested.nested_tensor([torch.arange(2), torch.arange(3)], layout=torch.jagged)
    data = DataProto.from_dict({"b": torch.rand(2, 3).bfloat16(), "m": torch.tensor([True, False]), "j": jagged})
    data.non_tensor_batch["o"] = np.array([{"pixels": torch.rand(2, 2), "ids": [1]}, None], dtype=object)
    data.save_to_disk(tmp_path / "batch.pkl")
    monkeypatch.delenv("VERL_DATAPROTO_SERIALIZATION_METHOD")  # the reader need not know the method
    back = DataProto.load_from_disk(tmp_path / "batch.pkl")
    for key in ("b", "m"):
        assert back.batch[key].dtype == data.batch[key].dtype and torch.equal(back.batch[key], data.batch[key])
    assert [part.tolist() for part in back.batch["j"].unbind()] == [[0, 1], [0, 1, 2]]
    assert torch.equal(back.non_tensor_batch["o"][0]["pixels"], data.non_tensor_batch["o"][0]["pixels"])


def test_unknown_serialization_method(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERL_DATAPROTO_SERIALIZATION_METHOD", "jpeg")
    with pytest.raises(ValueError, match="numpy or torch"):
        pickle.dumps(_batch())
    with pytest.raises(ValueError, match="'x'"):
        deserialize_tensordict(((1,), None, {"x": (1, 2, 3, 4)}))


def test_buffers_travel_without_a_copy_and_arrive_writable() -> None:
    data = _batch()
    data.non_tensor_batch["o"] = np.array([{"pixels": torch.rand(4)}] * 6, dtype=object)
    buffers: list[pickle.PickleBuffer] = []
    text = pickle.dumps(data[2:4], protocol=5, buffer_callback=buffers.append)
    addresses = {np.frombuffer(buffer, dtype=np.uint8).ctypes.data for buffer in buffers}
    assert {_pointer(data[2:4]), _pointer(data[2:4], "y")} <= addresses
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        back = pickle.loads(text, buffers=[bytes(buffer) for buffer in buffers])
        back.batch["x"] += 1
        back.non_tensor_batch["id"] += 1
        back.non_tensor_batch["o"][0]["pixels"] += 1
    assert torch.equal(back.batch["x"], data.batch["x"][2:4] + 1)
    assert serialize_tensordict(data.batch)[0] == (6,)


def test_inspection(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    data = _batch()
    info = data.get_data_info()
    for line in ("x: (6, 2) (torch.int64) cpu", "id: ndarray(6,) (int64)", "k: int"):
        assert line in info
    data.print_size("here")
    assert "here" in capsys.readouterr().out
    assert not data.is_padding_enabled()
    monkeypatch.setenv("VERL_AUTO_PADDING", "TRUE")
    assert data.is_padding_enabled()
    assert len(DataProto()) == 0 and data.to("cpu") is data
    assert data.select(deepcopy=True).non_tensor_batch["id"] is not data.non_tensor_batch["id"]


def test_all_gather_in_a_group_of_one(tmp_path: Path) -> None:
    import torch.distributed as dist

    use_one_thread()
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        data = DataProto.from_dict({"x": torch.tensor([True, False]), "e": torch.zeros(2, 0)}, {"o": ["a", "b"]})
        all_gather_data_proto(data, dist.group.WORLD)
    finally:
        dist.destroy_process_group()
    assert data.batch["x"].tolist() == [True, False] and data.non_tensor_batch["o"].tolist() == ["a", "b"]


def test_future_applies_dispatch_after_collect() -> None:
    parts = _batch().chunk(2)
    future = DataProtoFuture(DataProto.concat, ["ref0", "ref1"], wait_fn=lambda refs: parts)
    nested = future.chunk(3)[1].chunk(2)[1]
    assert nested.get().non_tensor_batch["id"].tolist() == [3]
    assert pickle.loads(pickle.dumps(DataProtoFuture(DataProto.concat, [], wait_fn=print))).wait_fn is None


# A batch as `save_to_disk` wrote it when `verl.protocol` and `verl.utils.serialization` were single modules.
_EARLIER_PICKLE = (
    b"fCZJB0ssI20001t4R&R6Y%XweZ**^CZ)}VSL}7GcP;zf{Z<8s3O9F*XeT)Hkj0I_KbT%|g0!sphj1z8kZE$%mUt@1_WiD=YZDn$4"
    b"V~h)5W^!+BVs&O_Wpb00D3%}q000000000000000000310000000062000000009300000004{yZgp*Nd6bL=WOR9OWs{VQ0(CKo"
    b"h=)>?C`$v30eqBBPEJby|Ns9=|NsC0O8|6YOCW`e0Yj8@QipSgeJG3pZj2aqWpZpTb#!TLb1rjba%o{~X?kIFX>V?nj0ksfX>?&?"
    b"Y-N*_XaFdd5C8xG0000000000000000RR9100000XabA^X*h|9hf*j@1B?MYluk}gO8@`=|4RS=|Nlz>bYe>ag=htIQiW2C0dI^J"
    b"Zgp*Nc`jdLZ*pZWZFOvPX<>45VR?)UUvgz*Z*FsRa&=>LlV|~q2X16xa&lpLlS=@FLjhukQYcFSO9F*x0*nGrIEjddQYcFUXar79"
    b"PD=m(|Nlz=|Ns9>KXhV=T_}Bw0d$mT28<bGWpib6X<=+>dSzd8X>Mn1WnXk<ZgX#Pla!1HW^8X^bTcwb0)=P*D3%BS0000000000"
    b"fIk2LfInyhO9+K%1$0t}g;H~UXbETvj0a|HZ((#ZGD`x5XaFdd2mk;8000000000000000Xah?Kg=htIQip|7b7gd5b$uv|0c&Un"
    b"XaFdd5C8xG0000000000008hm00000008hmXabA^W;lt6hf*j@184|NPEJby|Ns9=|NsC0O8|6YO9F*x1$0t{QfLWi3XBJ4Y;R$7"
    b"Gcrp7g=hdMmIMF*000000001hKWGC>1chh?bW(?fQgw%7E&"
)


def test_loads_pickles_of_earlier_versions() -> None:
    data = pickle.loads(base64.b85decode(_EARLIER_PICKLE))
    assert data.batch["x"].tolist() == [[0, 1], [2, 3]]
    assert data.non_tensor_batch["n"].tolist() == [0, 1]
    assert [item["t"].tolist() for item in data.non_tensor_batch["o"]] == [[1, 1], [0, 0]]
    assert data.meta_info["k"].tolist() == [1, 1] and data.meta_info["t"].tolist() == [1]
