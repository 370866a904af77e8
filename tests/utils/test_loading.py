"""Prepared files run nothing; files of runs, of this version and earlier ones, are read whole."""

import collections
import datetime
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from tests.ranks import use_one_thread
from verl.errors import CheckpointError, UntrustedClassError
from verl.protocol import DataProto
from verl.utils.loading import load_pickle, load_state, load_tensors, not_finite, untrusted_classes

use_one_thread()


class Attack:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


class Calls:
    """An object whose unpickling calls a function, then gives its result a state."""

    def __init__(self, *parts: Any) -> None:
        self.parts = parts

    def __reduce__(self) -> tuple[Any, ...]:
        return self.parts


class Curriculum:
    """A sampler's state of a user."""

    def __init__(self) -> None:
        self.difficulty = {"easy": 0.25}


STATE = {
    "_snapshot": {"step": 3, "generator": torch.arange(4, dtype=torch.uint8), "none": None},
    "seen": {1, 2},
    "counts": collections.Counter("ab"),
    "window": collections.deque([1.5], 4),
    "by_source": collections.defaultdict(list, {"math": [2**70]}),
    "time": datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    "weights": np.linspace(0, 1, 5),
    "names": np.array(["a", None], dtype=object),
}


def same(left: Any, right: Any) -> bool:
    """Whether two trees of containers, tensors and arrays are equal."""
    if isinstance(left, dict):
        return type(left) is type(right) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, torch.Tensor | np.ndarray):
        return type(left) is type(right) and left.dtype == right.dtype and left.tolist() == right.tolist()
    return type(left) is type(right) and bool(left == right)


def test_a_state_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "data.pt"
    torch.save(STATE, path)
    assert untrusted_classes(path, []) == [] and same(load_state(path), STATE)


def test_a_batch_is_read_whole(tmp_path: Path) -> None:
    media = [{"image": Image.new("RGB", (2, 3), (9, 8, 7)), "pixels": torch.rand(2), "at": np.arange(2)}, None]
    data = DataProto.from_dict(
        {"ids": torch.arange(4).view(2, 2), "none": torch.zeros(2, 0)},
        {"media": media, "uid": np.array(["a", "b"])},
        {"dtype": torch.bfloat16, "mean": np.float32(0.5), "text": "x"},
    )
    data.save_to_disk(tmp_path / "batch.pkl")
    back = DataProto.load_from_disk(tmp_path / "batch.pkl")
    assert back.meta_info == data.meta_info and back.non_tensor_batch["uid"].tolist() == ["a", "b"]
    assert back.batch["ids"].tolist() == [[0, 1], [2, 3]] and back.batch["none"].shape == (2, 0)
    first = back.non_tensor_batch["media"][0]
    assert first["image"].getpixel((1, 2)) == (9, 8, 7) and torch.equal(first["pixels"], media[0]["pixels"])


READERS = {
    "pickle": (load_pickle, lambda value, path: path.write_bytes(pickle.dumps(value))),
    "batch": (DataProto.load_from_disk, lambda value, path: path.write_bytes(pickle.dumps(value))),
    "state": (load_state, torch.save),
    "tensors": (load_tensors, torch.save),
}


@pytest.mark.parametrize("kind", READERS)
def test_a_prepared_file_runs_nothing(tmp_path: Path, kind: str) -> None:
    load, save = READERS[kind]
    path = tmp_path / "file"
    for value in (Attack(tmp_path / "made"), {"x": [Attack(tmp_path / "made")]}):
        save(value, path)
        with pytest.raises(CheckpointError, match=r"os\.mkdir|posix\.mkdir|nt\.mkdir") as caught:
            load(path)
        assert str(path) in str(caught.value)
    assert not (tmp_path / "made").exists()


def test_a_class_of_the_user_is_loaded_if_it_is_trusted(tmp_path: Path) -> None:
    path = tmp_path / "data.pt"
    torch.save({"sampler": Curriculum(), "other": Calls(Curriculum, ())}, path)
    name = f"{__name__}.Curriculum"
    with pytest.raises(UntrustedClassError, match=rf"data\.pt names {name}.*trainer\.trusted_classes=\[{name}\]"):
        load_state(path)
    assert untrusted_classes(path, []) == [name] and untrusted_classes(path, [name]) == []
    assert load_state(path, [name])["sampler"].difficulty == {"easy": 0.25}
    generator = np.random.default_rng(5)
    torch.save({"generator": generator}, path)
    names = untrusted_classes(path, [])
    assert "numpy.random._pickle.__generator_ctor" in names
    assert load_state(path, names)["generator"].integers(1 << 40) == generator.integers(1 << 40)
    pickle.dump(Curriculum(), (tmp_path / "batch.pkl").open("wb"))
    assert load_pickle(tmp_path / "batch.pkl", [name]).difficulty == {"easy": 0.25}


ARRAY = np._core.multiarray._reconstruct
EMPTY = (ARRAY, (np.ndarray, (0,), b"b"))
HOSTILE = {
    "fewer objects than the shape says": Calls(*EMPTY, (1, (9,), np.dtype("O"), False, [1])),
    "fewer bytes than the shape says": Calls(*EMPTY, (1, (9,), np.dtype("i8"), False, b"1")),
    "a dtype that calls numbers objects": Calls(np.dtype, ("i8", False, True), (3, "<", None, None, None, -1, -1, 63)),
    "an array of any size": Calls(ARRAY, (np.ndarray, (1 << 50,), b"b")),
    "an array over given memory": Calls(np.ndarray, ((1,), "O", b"12345678")),
    "bytes of any size": Calls(bytearray, (1 << 50,)),
    "a class with other attributes": Calls(*EMPTY, None),
    "not a pickle": None,
}


@pytest.mark.parametrize("kind", ["pickle", "state"])
@pytest.mark.parametrize("what", HOSTILE)
def test_a_hostile_file_ends_in_an_error(tmp_path: Path, what: str, kind: str) -> None:
    load, save = READERS[kind]
    path = tmp_path / "file"
    save(HOSTILE[what], path)
    if what == "not a pickle":
        path.write_bytes(path.read_bytes()[:-9] + b"\x80garbage")
    if what == "a class with other attributes":
        path.write_bytes(b"cdatetime\ntimezone\n(N}Vutc\nI1\nstb." if kind == "pickle" else b"PK")
    if what == "a dtype that calls numbers objects":
        assert kind == "state" or load(path) == np.dtype("i8")  # the state of a dtype says nothing that is used
        return
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)


def test_a_state_may_not_be_compressed_or_a_program(tmp_path: Path) -> None:
    path = tmp_path / "data.pt"
    torch.save({"x": torch.zeros(1000)}, path)
    with zipfile.ZipFile(path) as whole, zipfile.ZipFile(tmp_path / "small.pt", "w", zipfile.ZIP_DEFLATED) as small:
        for name in whole.namelist():
            small.writestr(name, whole.read(name))
    with pytest.raises(CheckpointError, match=r"small\.pt cannot be read .*compressed"):
        load_state(tmp_path / "small.pt")
    torch.jit.script(torch.nn.Linear(1, 1)).save(str(path))
    with pytest.raises(CheckpointError):
        load_state(path)


def test_an_empty_tensor_has_an_empty_shape() -> None:
    from verl.utils.batch.serialization import deserialize_single_tensor

    nothing = np.zeros(0, dtype=np.uint8)
    assert deserialize_single_tensor(("float32", (2, 0), nothing)).shape == (2, 0)
    with pytest.raises(RuntimeError):
        deserialize_single_tensor(("float32", (1 << 40,), nothing))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("size", [1, 33, 4096])
def test_values_that_no_weight_may_have(dtype: torch.dtype, size: int) -> None:
    values = torch.full((size,), torch.finfo(dtype).max, dtype=dtype)
    assert not_finite(values) is None and not_finite(values[:0]) is None and not_finite(torch.ones(3).long()) is None
    assert not_finite(values.to(torch.float8_e4m3fn)) is None
    assert not_finite(torch.tensor([1.0, torch.nan]).to(torch.float8_e4m3fn)) == "NaN"
    for value, name in ((float("-inf"), "infinity"), (float("nan"), "NaN")):
        values[size // 2] = value
        assert not_finite(values) == name


def test_a_part_of_a_file_is_read(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save({"x": torch.ones(2)}, buffer)
    buffer.seek(0)
    assert load_tensors(buffer)["x"].tolist() == [1, 1]
    with pytest.raises(FileNotFoundError):
        load_pickle(tmp_path / "absent")
