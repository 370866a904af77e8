"""Checkpoints that an engine of Megatron-Core loads after it has trained: nothing of its own steps is left."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.utils.checkpoint.megatron_ranks import build, step
from tests.workers.engine import cases, megatron_cases
from verl.utils.checkpoint import verify_checkpoint
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
