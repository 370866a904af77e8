"""Checkpoints that an engine of Megatron-Core loads after it has trained: nothing of its own steps is left."""

import json
import os
import pickle
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from tests.ranks import spawn_ranks
from tests.utils.checkpoint.megatron_ranks import build, step
from tests.utils.checkpoint.test_torch_dist import Attack
from tests.workers.engine import cases, megatron_cases
from verl.utils.checkpoint import verify_checkpoint
from verl.utils.checkpoint.files import record_file
from verl.workers.config import CheckpointConfig

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("megatron_loading")
    cases.write_model(folder / "plain", **megatron_cases.LAYERS)
    yield folder
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


def test_steps_after_the_checkpoint_repeat(root: Path, tmp_path: Path) -> None:
    engine = build(root, "plain", {})
    step(engine)
    engine.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    expected = [step(engine) for _ in range(2)]
    engine.load_checkpoint(str(tmp_path / "actor"))
    assert [step(engine) for _ in range(2)] == expected


def test_weights_alone_replace_those_that_the_optimizer_keeps(root: Path, tmp_path: Path) -> None:
    """Otherwise the next step writes the weights before the load back."""
    doubled, engine = (build(root, "plain", {"dtype": "bf16"}) for _ in range(2))
    alone = CheckpointConfig(save_contents=["model"], load_contents=["model"])
    doubled.checkpoint_config = engine.checkpoint_config = alone
    with torch.no_grad():
        for _, parameter in doubled.local_parameters():
            parameter.mul_(2)
    doubled.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    engine.load_checkpoint(str(tmp_path / "actor"))
    step(engine)
    stepped, loaded = cases.export(engine), cases.export(doubled)
    for name, tensor in stepped.items():
        # A step moves a weight by about the learning rate of 0.01.
        torch.testing.assert_close(tensor.float(), loaded[name].float(), atol=0.03, rtol=0.01)


def test_a_save_takes_its_place_and_leaves_what_is_not_its_own(root: Path, tmp_path: Path) -> None:
    """Files and links in the place of its folders, and parts of an older save."""
    engine = build(root, "plain", {})
    folder = tmp_path / "global_step_2" / "actor"
    folder.parent.write_text("mine")
    engine.save_checkpoint(str(folder), global_step=2)
    assert verify_checkpoint(folder) == [] and (tmp_path / "global_step_2.aside.1").read_text() == "mine"

    own = tmp_path / "my own"
    own.mkdir()
    shutil.rmtree(folder / "dist_ckpt")
    (folder / "dist_ckpt").symlink_to(own)
    (folder / "huggingface" / "model.safetensors").touch()  # of a run that saved hf_model
    (folder / "notes.tmp").mkdir()
    engine.save_checkpoint(str(folder), global_step=2)
    assert verify_checkpoint(folder) == [] and not any(own.iterdir())
    assert (folder / "notes.tmp").is_dir() and not (folder / "huggingface" / "model.safetensors").exists()
    shutil.rmtree(folder / "dist_ckpt")
    (folder / "dist_ckpt").write_text("mine")
    engine.save_checkpoint(str(folder), global_step=2)
    assert verify_checkpoint(folder) == [] and (folder / "dist_ckpt.aside.2").read_text() == "mine"
    expected = step(engine)
    engine.load_checkpoint(str(folder))
    assert step(engine) == expected


# ---- checkpoints that another person made

KINDS = ["plain", "critic"]


def from_folder(path: str) -> dict[str, Any]:
    return {"use_dist_checkpointing": True, "dist_checkpointing_path": path}


def move_parts(folder: Path, made: Path) -> None:
    """Place what is no tensor in another folder, where it makes a file, and let the manifest fit the index."""
    name = "dist_ckpt/.metadata"
    index = pickle.loads((folder / name).read_bytes())
    objects = [
        key for key in index.storage_data if isinstance(index.state_dict_metadata[key.fqn], BytesStorageMetadata)
    ]
    assert objects
    (folder / "dist_ckpt" / "sub").mkdir()
    for key in objects:
        place = index.storage_data[key]
        file = folder / "dist_ckpt" / "sub" / place.relative_path
        torch.save(Attack(made), file)
        vars(place).update(relative_path=f"sub/{place.relative_path}", offset=0, length=file.stat().st_size)
    (folder / name).write_bytes(pickle.dumps(index))
    (manifest,) = folder.glob("manifest_*_rank_0.json")
    content = json.loads(manifest.read_text())
    kept = [record for record in content["files"] if record["name"] != name]
    manifest.write_text(json.dumps({**content, "files": [*kept, asdict(record_file(folder, name))]}))


@pytest.mark.parametrize("kind", KINDS)
def test_parts_in_another_folder_run_nothing(root: Path, tmp_path: Path, kind: str) -> None:
    from verl.utils.model import load_mcore_dist_weights

    engine = build(root, kind, {})
    step(engine)
    engine.save_checkpoint(str(tmp_path / "saved"), global_step=1)
    move_parts(tmp_path / "saved", tmp_path / "made")
    tensors = str(tmp_path / "saved" / "dist_ckpt")
    loads: list[Any] = [
        lambda: engine.load_checkpoint(str(tmp_path / "saved")),
        lambda: build(root, kind, from_folder(tensors)),
        lambda: load_mcore_dist_weights(engine.models, tensors),
    ]
    for load in loads:
        with pytest.raises(ValueError, match="in 'sub/__0_0.distcp': it must be in a file of the same folder"):
            load()
    assert not (tmp_path / "made").exists()


def watch_loads(rank: int, root: Path, folder: Path) -> None:
    """Save and load, and write down which files below ``folder`` the loads open."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    opened: set[str] = set()
    for kind in KINDS:
        engine = build(root, kind, {})
        step(engine)
        engine.save_checkpoint(str(folder / kind), global_step=1)
        (folder / kind / "dist_ckpt" / "sub").mkdir()
    is_loading = True
    sys.addaudithook(lambda event, args: opened.add(str(args[0])) if event == "open" and is_loading else None)
    for kind in KINDS:
        engine = build(root, kind, {})
        engine.load_checkpoint(str(folder / kind))
        build(root, kind, from_folder(str(folder / kind)))
    is_loading = False
    (folder / "opened.json").write_text(json.dumps(sorted(opened)))


def test_loaders_open_the_files_that_are_checked(root: Path, tmp_path: Path) -> None:
    """An audit hook tells which files Python opens, also for torch and for Megatron-Core."""
    spawn_ranks(watch_loads, (root, tmp_path), nprocs=1)
    opened = {Path(name) for name in json.loads((tmp_path / "opened.json").read_text())}
    for kind in KINDS:
        (manifest,) = (tmp_path / kind).glob("manifest_*_rank_0.json")
        listed = {tmp_path / kind / record["name"] for record in json.loads(manifest.read_text())["files"]}
        found = {path for path in opened if path.is_relative_to(tmp_path / kind)}
        assert found <= {*listed, manifest}
        assert {path for path in listed if path.suffix == ".distcp"} <= found
