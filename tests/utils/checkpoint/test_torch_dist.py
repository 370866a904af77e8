"""Distributed checkpoints that another person made: their index and their parts run nothing."""

import json
import pickle
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.ranks import use_one_thread
from verl.utils.checkpoint.files import CheckpointError, record_file
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


def test_tensors_are_read_and_objects_checked(folder: Path) -> None:
    reader = TorchDistReader(folder)
    reader.check_objects()
    assert reader.names() == {"weight"} and reader.read("weight").tolist() == [[0, 1, 2], [3, 4, 5]]


def test_a_prepared_index_runs_nothing(folder: Path, tmp_path: Path) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(Attack(tmp_path / "made")))
    with pytest.raises(CheckpointError, match=r"\.metadata names pathlib\.Path\.touch"):
        TorchDistReader(folder)
    (folder / ".metadata").write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(CheckpointError, match="cannot be read .it holds a dict"):
        TorchDistReader(folder)
    assert not (tmp_path / "made").exists()


def test_a_prepared_part_runs_nothing(tmp_path: Path) -> None:
    """Megatron-Core unpickles parts that are no tensors; so does the library of torch that wrote this one."""
    dcp.save({"extra": Attack(tmp_path / "made")}, checkpoint_id=tmp_path / "at", no_dist=True)
    (tmp_path / "at" / "metadata.json").write_text('{"sharded_backend": "torch_dist"}')
    with pytest.raises(CheckpointError, match="does not hold extra where it should"):
        TorchDistReader(tmp_path / "at").check_objects()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda entry, place: setattr(entry, "size", torch.Size([1 << 40])), "lists weight with more bytes"),
        (lambda entry, place: setattr(place, "relative_path", "/etc/hostname"), "hostname is missing"),
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
