"""Distributed checkpoints that another person made: their index and their parts run nothing."""

import json
import os
import pickle
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.distributed.checkpoint.metadata import MetadataIndex

from tests.ranks import use_one_thread
from verl.errors import CheckpointError
from verl.utils.checkpoint.files import record_file
from verl.utils.checkpoint.torch_dist import TorchDistReader

use_one_thread()


class Attack:
    """An object whose unpickling makes a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


def prepare_index(folder: Path, made: Path) -> None:
    """Let the index of a Megatron checkpoint make a file when it is unpickled, and its manifest fit it."""
    name = "dist_ckpt/.metadata"
    (folder / name).write_bytes(pickle.dumps(Attack(made)))
    (path,) = folder.glob("manifest_*_rank_0.json")
    content = json.loads(path.read_text())
    kept = [record for record in content["files"] if record["name"] != name]
    path.write_text(json.dumps({**content, "files": [*kept, asdict(record_file(folder, name))]}))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with a tensor and an object."""
    folder = tmp_path / "dist_ckpt"
    dcp.save({"weight": torch.arange(6.0).view(2, 3), "extra": {"scale": 1}}, checkpoint_id=folder, no_dist=True)
    (folder / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    return folder


def test_tensors_and_objects_are_read(folder: Path) -> None:
    reader = TorchDistReader(folder)
    assert reader.names() == {"weight"} and reader.read("weight").tolist() == [[0, 1, 2], [3, 4, 5]]
    assert reader.load_part(MetadataIndex("extra.scale")) == 1


def test_a_prepared_index_runs_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=r"\.metadata names pathlib\.Path\.touch"):
        TorchDistReader(folder)
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(CheckpointError, match="cannot be read .*it holds a dict"):
        TorchDistReader(folder)
    assert not (tmp_path / "made").exists()


def test_a_prepared_part_runs_nothing(tmp_path: Path) -> None:
    """Megatron-Core unpickles parts that are no tensors; so does the library of torch that wrote this one."""
    dcp.save({"extra": Attack(tmp_path / "made")}, checkpoint_id=tmp_path / "at", no_dist=True)
    (tmp_path / "at" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CheckpointError, match="does not hold extra where it should"):
        TorchDistReader(tmp_path / "at").load_part(MetadataIndex("extra"))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry, place: setattr(entry, "size", torch.Size([1 << 40])), "lists weight with more bytes"),
        (lambda entry, place: setattr(place, "offset", 1), "does not hold weight where it should"),
    ],
)
def test_an_index_that_lies_is_named(folder: Path, change: Any, message: str) -> None:
    index = pickle.loads((folder / ".metadata").read_bytes())
    (place,) = (place for key, place in index.storage_data.items() if key.fqn == "weight")
    change(index.state_dict_metadata["weight"], place)
    (folder / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=message):
        TorchDistReader(folder).read("weight")


def change_places(folder: Path, **values: Any) -> None:
    """Give every part of an index other places."""
    index = pickle.loads((folder / ".metadata").read_bytes())
    for place in index.storage_data.values():
        vars(place).update(values)
    (folder / ".metadata").write_bytes(pickle.dumps(index))


PATHS: list[Any] = ["sub/__0_0.distcp", "../at/__0_0.distcp", "/etc/hostname", "./__0_0.distcp", "__0_0.distcp/"]
PATHS += ["", ".", "..", "sub//__0_0.distcp", b"__0_0.distcp", 3, None, Path("__0_0.distcp"), ["__0_0.distcp"]]
PATHS += ["a\0b", "x" * 300]
PLACES: list[dict[str, Any]] = [
    *({"relative_path": path} for path in PATHS),
    *({"transform_descriptors": value} for value in (["zstd"], ("zstd", "x"), "zstd", {"zstd": 1})),
    *({"offset": value} for value in (-1, 1 << 62, 1.5, "0", None, True)),
    *({"length": value} for value in (-1, 1 << 62, 0, 1, 1.5, "9", None)),
]


@pytest.mark.parametrize("values", PLACES, ids=str)
def test_a_part_is_in_a_file_of_the_same_folder(folder: Path, values: dict[str, Any]) -> None:
    change_places(folder, **values)
    with pytest.raises(CheckpointError, match=re.escape(str(folder))):
        TorchDistReader(folder).read("weight")


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_generated_place_leads_out_of_the_folder(folder: Path, data: st.DataObject) -> None:
    names = st.text(st.sampled_from("a./\\\0~ \n__0_0.distcp"), max_size=12)
    values = st.none() | st.integers() | st.text() | st.floats() | st.lists(st.text(), max_size=2)
    change_places(
        folder,
        relative_path=data.draw(names | st.builds("{}/__0_0.distcp".format, names) | values),
        offset=data.draw(st.integers(-4, 4) | values),
        transform_descriptors=data.draw(st.none() | values),
    )
    try:
        reader = TorchDistReader(folder)
    except CheckpointError:
        return
    for place in reader.index.storage_data.values():
        assert os.path.dirname(os.path.normpath(folder / place.relative_path)) == str(folder)


def test_a_named_pipe_is_no_part(folder: Path) -> None:
    os.mkfifo(folder / "pipe")
    change_places(folder, relative_path="pipe")
    with pytest.raises(CheckpointError, match="is a named pipe, not a file"):
        TorchDistReader(folder).read("weight")
    (folder / ".metadata").unlink()
    os.mkfifo(folder / ".metadata")
    with pytest.raises(CheckpointError, match="is a named pipe, not a file"):
        TorchDistReader(folder)
