"""The converter from Hugging Face to Megatron-Core and back is exact for every family; runs start from its files."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.workers.engine import cases, megatron_cases
from verl.model_merger.__main__ import main as merge
from verl.workers.config import McoreEngineConfig

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")

MODELS = (
    "plain", "tied", "llama", "qwen3", "qwen3_bias", "qwen3_moe", "qwen3_moe_mixed", "qwen2_moe", "mixtral", "deepseek",
    "moonlight",
)  # fmt: skip


@pytest.fixture(scope="module")
def converter() -> ModuleType:
    path = Path(__file__).resolve().parents[2] / "scripts" / "converter_hf_to_mcore.py"
    spec = importlib.util.spec_from_file_location("converter_hf_to_mcore", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("converter")
    megatron_cases.write_models(folder)
    yield folder
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def in_dtype(source: Path, target: Path, dtype: torch.dtype) -> Path:
    """Copy a model in another dtype."""
    target.mkdir()
    weights = {name: tensor.to(dtype) for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text()) | {"dtype": str(dtype).removeprefix("torch.")}
    (target / "config.json").write_text(json.dumps(config))
    return target


def convert(converter: ModuleType, model: Path, output: Path, *more: str) -> int:
    code: int = converter.main(["--hf_model_path", str(model), "--output_path", str(output), *more])
    return code


CASES = [(name, torch.bfloat16) for name in MODELS] + [("plain", torch.float16), ("plain", torch.float32)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_there_and_back_every_byte_is_the_same(
    converter: ModuleType, root: Path, tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    model = in_dtype(root / name, tmp_path / "model", dtype)
    assert convert(converter, model, tmp_path / "mcore", "--test") == 0
    back = ["merge", "--backend", "megatron", "--local_dir", str(tmp_path / "mcore")]
    assert merge([*back, "--target_dir", str(tmp_path / "back")]) == 0
    original, returned = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert original.keys() == returned.keys()
    for key, tensor in original.items():
        assert returned[key].dtype == dtype and torch.equal(returned[key].view(torch.uint8), tensor.view(torch.uint8))


@pytest.mark.full
@pytest.mark.parametrize("name", ["tied", "qwen3_moe", "deepseek"])
def test_two_processes_write_what_one_writes(root: Path, tmp_path: Path, name: str) -> None:
    """Under torchrun each process holds half of the layers, and merging restores every byte."""
    model = in_dtype(root / name, tmp_path / "model", torch.bfloat16)
    repository = Path(__file__).resolve().parents[2]
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    script = [str(repository / "scripts" / "converter_hf_to_mcore.py"), "--test"]
    folders = ["--hf_model_path", str(model), "--output_path", str(tmp_path / "mcore")]
    done = subprocess.run(
        [*launch, *script, *folders],
        env=os.environ | {"PYTHONPATH": str(repository)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"all tensors equal those of {model}" in done.stdout + done.stderr
    back = ["merge", "--backend", "megatron", "--local_dir", str(tmp_path / "mcore")]
    assert merge([*back, "--target_dir", str(tmp_path / "back")]) == 0
    original, returned = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "back"))
    assert original.keys() == returned.keys()
    for key, tensor in original.items():
        assert returned[key].dtype == tensor.dtype
        assert torch.equal(returned[key].view(torch.uint8), tensor.view(torch.uint8)), key


def test_tensors_of_another_dtype_keep_it(converter: ModuleType, root: Path, tmp_path: Path) -> None:
    model, other = in_dtype(root / "deepseek", tmp_path / "model", torch.bfloat16), "e_score_correction_bias"
    weights = load_file(model / "model.safetensors")
    weights |= {name: torch.rand(len(tensor)) for name, tensor in weights.items() if name.endswith(other)}
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    assert convert(converter, model, tmp_path / "mcore", "--test") == 0
    back = ["merge", "--backend", "megatron", "--local_dir", str(tmp_path / "mcore")]
    assert merge([*back, "--target_dir", str(tmp_path / "back")]) == 0
    returned = load_file(tmp_path / "back" / "model.safetensors")
    assert {returned[name].dtype for name in weights if name.endswith(other)} == {torch.float32}
    for name, tensor in weights.items():
        assert returned[name].dtype == tensor.dtype and torch.equal(returned[name], tensor), name


def test_layers_that_predict_further_tokens_are_left_out(converter: ModuleType, root: Path, tmp_path: Path) -> None:
    """As transformers leaves them out; the file has one after the last layer."""
    model = in_dtype(root / "glm4_moe", tmp_path / "model", torch.bfloat16)
    weights = load_file(model / "model.safetensors")
    last = {name: tensor for name, tensor in weights.items() if name.startswith("model.layers.3.")}
    extra = {name.replace(".3.", ".4.", 1): tensor.clone() for name, tensor in last.items()}
    extra["model.layers.4.eh_proj.weight"] = torch.rand(64, 128, dtype=torch.bfloat16)
    save_file(weights | extra, model / "model.safetensors", metadata={"format": "pt"})
    assert convert(converter, model, tmp_path / "mcore", "--test") == 0
    back = ["merge", "--backend", "megatron", "--local_dir", str(tmp_path / "mcore")]
    assert merge([*back, "--target_dir", str(tmp_path / "back")]) == 0
    returned = load_file(tmp_path / "back" / "model.safetensors")
    assert returned.keys() == weights.keys()
    assert all(torch.equal(returned[name], tensor) for name, tensor in weights.items())


@pytest.mark.parametrize("kind", ["language_model", "value_model"])
@pytest.mark.parametrize("inner", ["", "dist_ckpt"])
def test_engines_start_from_what_was_converted(
    converter: ModuleType, root: Path, tmp_path: Path, kind: str, inner: str
) -> None:
    assert convert(converter, root / "tied", tmp_path / "mcore") == 0
    bare = tmp_path / "bare"  # configuration and tokenizer only
    bare.mkdir()
    (bare / "config.json").write_text((root / "tied" / "config.json").read_text())
    path = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(tmp_path / "mcore" / inner)}
    ours = cases.export(megatron_cases.build(bare, path, kind))
    theirs = cases.export(megatron_cases.build(root / "tied", {}, kind))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_critic_starts_from_the_head_of_a_critic(root: Path, tmp_path: Path) -> None:
    critic = megatron_cases.build(root / "plain", {}, "value_model")
    with critic.train_mode():
        critic.train_batch(cases.batch(**cases.MICRO[4]), cases.loss_fn)
    critic.save_checkpoint(str(tmp_path / "critic"))
    path = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(tmp_path / "critic")}
    ours, theirs = cases.export(megatron_cases.build(root / "plain", path, "value_model")), cases.export(critic)
    assert "score.weight" in ours and all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_what_cannot_be_used_is_named(
    converter: ModuleType, root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert convert(converter, root / "plain", tmp_path / "mcore") == 0

    def refusal(path: Path, model: str = "plain", kind: str = "language_model", **more: Any) -> str:
        settings = {"use_dist_checkpointing": True, "dist_checkpointing_path": str(path)}
        with pytest.raises(ValueError, match=f"dist_checkpointing_path={path}: ") as error:
            megatron_cases.build(root / model, settings | more, kind)
        return str(error.value)

    assert "metadata.json is missing" in refusal(root / "plain")
    assert "lacks decoder.layers.mlp.experts" in refusal(tmp_path / "mcore", "mixtral")
    assert "lacks output_layer" in refusal(tmp_path / "mcore", kind="reward_model", forward_only=True)
    cases.write_model(root / "larger", num_hidden_layers=4, vocab_size=120)
    assert "has 97 rows, but the vocabulary has 120 tokens" in refusal(tmp_path / "mcore", "larger")
    index = tmp_path / "mcore" / "dist_ckpt" / ".metadata"
    index.write_bytes(index.read_bytes()[:100])
    assert ".metadata cannot be read" in refusal(tmp_path / "mcore")
    with pytest.raises(ValueError, match="dist_checkpointing_path=null: must name a folder"):
        McoreEngineConfig(use_dist_checkpointing=True)
    capsys.readouterr()
    assert convert(converter, tmp_path / "mcore", tmp_path / "again") == 2
    assert "model.path" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()
