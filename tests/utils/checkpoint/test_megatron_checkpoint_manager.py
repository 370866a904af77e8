"""Megatron checkpoints: read by other layouts, written beside training, and refused when something is wrong."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import spawn_ranks
from tests.utils.checkpoint import megatron_ranks
from tests.utils.checkpoint.megatron_ranks import RESUMED, SAVED, build, checkpoint_of, run_rank, step
from tests.utils.checkpoint.test_torch_dist import prepare_index
from tests.workers.engine import cases, megatron_cases
from verl.utils.checkpoint import verify_checkpoint
from verl.workers.config import CheckpointConfig, HFModelConfig

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("megatron_checkpoints")
    megatron_cases.write_models(folder)
    cases.write_model(folder / "fewer layers", num_hidden_layers=2)
    cases.write_model(folder / "wider", num_hidden_layers=4, intermediate_size=128)
    spawn_ranks(run_rank, (2, folder))
    yield folder
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(root: Path) -> list[dict[str, Any]]:
    return [torch.load(root / f"rank_{rank}.pt") for rank in range(2)]


# ---- other layouts


def same_steps(steps: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert len(steps) == megatron_ranks.STEPS
    for ours, theirs in zip(steps, expected, strict=True):
        assert ours["lr"] == theirs["lr"] < megatron_ranks.SMOOTH["lr"]
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", RESUMED)
def test_another_layout_goes_on_with_the_same_losses(found: list[dict[str, Any]], name: str) -> None:
    for rank in found:
        same_steps(rank[name], rank[RESUMED[name][0]])


@pytest.mark.parametrize("name", SAVED)
def test_one_rank_goes_on_with_the_same_losses(root: Path, found: list[dict[str, Any]], name: str) -> None:
    engine = build(root, SAVED[name][0], {})
    engine.load_checkpoint(str(checkpoint_of(root, name)))
    same_steps([step(engine) for _ in range(megatron_ranks.STEPS)], found[0][name])


def test_steps_that_are_compared_differ(found: list[dict[str, Any]]) -> None:
    losses = [each["loss"] for each in found[0]["tp 2"]]
    assert min(abs(a - b) for a, b in zip(losses, losses[1:], strict=False)) > 1e-3


# ---- beside training


def test_training_goes_on_while_a_rank_writes(found: list[dict[str, Any]]) -> None:
    for rank in found:
        part = rank["async"]
        assert part["finished while rank 1 writes"] is False and part["finished"] is True
        assert part["problems while rank 1 writes"] == [
            f"manifest_world_size_2_rank_{each}.json is missing: rank {each} did not finish writing" for each in (0, 1)
        ]
        assert part["problems"] == []
        assert part["kept while rank 1 writes"] == [True, True] and part["kept"] == [False, True]
        assert part["weights are those of the save"] is True
        assert part["restored"] == part["next"]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_what_one_rank_cannot_write_all_ranks_raise(found: list[dict[str, Any]], asynchronous: bool) -> None:
    for rank in found:
        said = rank[f"full, {asynchronous}"]
        assert "could not be written: rank 1: OSError: [Errno 28] No space left" in said and "rank 0" not in said


# ---- what cannot be loaded


def test_all_ranks_refuse_what_one_finds_changed(found: list[dict[str, Any]]) -> None:
    for rank in found:
        assert "rank 1: dist_ckpt/__1_0.distcp has the right size but the wrong content" in rank["damaged"]


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


DAMAGES = {
    "dist_ckpt/__0_0.distcp": (Path.unlink, "dist_ckpt/__0_0.distcp is missing"),
    "dist_ckpt/__1_0.distcp": (_cut, "__1_0.distcp has .* bytes instead of .*: it was truncated"),
    "dist_ckpt/.metadata": (_flip, "dist_ckpt/.metadata has the right size but the wrong content"),
    "dist_ckpt/common.pt": (_cut, "dist_ckpt/common.pt has .* bytes"),
    "dist_ckpt/metadata.json": (Path.unlink, "dist_ckpt/metadata.json is missing"),
    "manifest_world_size_2_rank_1.json": (Path.unlink, "rank 1 did not finish writing"),
    "megatron_config.json": (lambda path: path.write_text("{"), "megatron_config.json cannot be read"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_named_and_another_checkpoint_offered(root: Path, tmp_path: Path, name: str) -> None:
    damage, message = DAMAGES[name]
    for number in (1, 2):
        shutil.copytree(checkpoint_of(root, "tp 2"), tmp_path / f"global_step_{number}")
    damage(tmp_path / "global_step_2" / name)
    engine = build(root, "plain", {})
    before = cases.export(engine)
    with pytest.raises(ValueError, match=f"(?s)global_step_2 cannot be loaded.*{message}.*global_step_1"):
        engine.load_checkpoint(str(tmp_path / "global_step_2"))
    assert all(torch.equal(tensor, before[key]) for key, tensor in engine.named_weights())


def test_a_prepared_index_runs_nothing(root: Path, tmp_path: Path) -> None:
    folder = tmp_path / "global_step_1"
    shutil.copytree(checkpoint_of(root, "tp 2"), folder)
    prepare_index(folder, tmp_path / "made")
    assert not verify_checkpoint(folder)
    with pytest.raises(ValueError, match=r"cannot be loaded: .*\.metadata names pathlib\.Path\.touch"):
        build(root, "plain", {}).load_checkpoint(str(folder))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("qwen3", 'another model: .*model_type="qwen3"'),
        ("tied", "another model: .*tie_word_embeddings=true, and false"),
        ("fewer layers", "another model: .*num_hidden_layers=2, and 4"),
        ("wider", "another model: .*intermediate_size=128, and 96"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(root: Path, model: str, message: str) -> None:
    with pytest.raises(ValueError, match=f"(?s)cannot be loaded: .*{message}"):
        build(root, model, {}).load_checkpoint(str(checkpoint_of(root, "tp 2")))


def test_another_backend_is_refused_on_both_sides(root: Path, tmp_path: Path) -> None:
    from verl.trainer.run.resume import misfit

    sharded: Any = cases.build(root / "plain")
    sharded.checkpoint_config = CheckpointConfig()
    with pytest.raises(ValueError, match="strategy=megatron wrote it: .*merge --backend megatron"):
        sharded.load_checkpoint(str(checkpoint_of(root, "tp 2")))
    sharded.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    with pytest.raises(ValueError, match="strategy=fsdp wrote it: .*merge --backend fsdp"):
        build(root, "plain", {}).load_checkpoint(str(tmp_path / "actor"))
    # the same by the driver, before any worker starts, which also knows that the number of workers may change
    shutil.copytree(checkpoint_of(root, "tp 2"), tmp_path / "megatron" / "actor")

    def problem(folder: Path, strategy: str, **changes: Any) -> str | None:
        model = HFModelConfig(path=str(root / "plain"), override_config=changes)
        return misfit(folder / "actor", strategy, 1, model, CheckpointConfig())

    assert problem(tmp_path, "fsdp2") is problem(tmp_path / "megatron", "megatron") is None
    assert "strategy=fsdp wrote it" in str(problem(tmp_path, "megatron"))
    assert "strategy=megatron wrote it" in str(problem(tmp_path / "megatron", "fsdp"))
    for folder, strategy in ((tmp_path, "fsdp"), (tmp_path / "megatron", "megatron")):
        other = problem(folder, strategy, rope_theta=5e5)
        assert "another model: this run's has rope_parameters.rope_theta=500000.0, and 10000" in str(other)


@pytest.mark.parametrize(
    ("saved", "message"),
    [
        (["model", "extra"], "the optimizer was never saved"),
        (["model", "optimizer"], "extra was never saved"),
        (["optimizer", "extra"], "it lacks decoder"),
    ],
)
def test_parts_that_were_never_saved_are_named(root: Path, tmp_path: Path, saved: list[str], message: str) -> None:
    engine = build(root, "plain", {})
    engine.checkpoint_config = CheckpointConfig(save_contents=saved)
    engine.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    with pytest.raises(ValueError, match=message):
        engine.load_checkpoint(str(tmp_path / "actor"))
    partial = build(root, "plain", {})
    partial.checkpoint_config = CheckpointConfig(save_contents=saved, load_contents=saved)
    partial.load_checkpoint(str(tmp_path / "actor"))


def test_experts_without_the_distributed_optimizer_keep_their_layout(root: Path, tmp_path: Path) -> None:
    plain = {"use_distributed_optimizer": False}
    build(root, "qwen3_moe", plain).save_checkpoint(str(tmp_path / "actor"), global_step=1)
    layout = tmp_path / "actor" / "megatron_config.json"
    layout.write_text(layout.read_text().replace('"ep": 1', '"ep": 2'))
    with pytest.raises(
        ValueError, match="with megatron.expert_model_parallel_size=2 and expert_tensor_parallel_size=1: without use_d"
    ):
        build(root, "qwen3_moe", plain).load_checkpoint(str(tmp_path / "actor"))


def test_names_and_numbers_of_layers_are_global(root: Path) -> None:
    """Names and shapes are the same whatever stage, virtual stage or part of a layer a rank holds."""
    from verl.utils.checkpoint.torch_dist import TorchDistReader

    readers = [TorchDistReader(checkpoint_of(root, name) / "dist_ckpt") for name in ("tp 2", "pp 2 x 2", "dp 2")]
    assert readers[0].names() == readers[1].names() == readers[2].names()
    for name in readers[1].names() - {"embedding.word_embeddings.weight", "output_layer.weight"}:
        shapes = {tuple(reader.shape(name)) for reader in readers}
        if not name.endswith(("word_embeddings.weight", "output_layer.weight")):  # of other padding
            assert len(shapes) == 1, name
    layers = json.loads((checkpoint_of(root, "tp 2") / "transformer_config.json").read_text())["num_layers"]
    assert readers[1].shape("decoder.layers.mlp.linear_fc1.weight") == (layers, 192, 64)
