"""Megatron checkpoints of every layout, merged in one process, equal the source bytes and load in transformers."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.model_merger.megatron_ranks import CASES, TRAINED, UNTRAINED, checkpoint_of, run_rank
from tests.ranks import spawn_ranks
from tests.utils.checkpoint.test_torch_dist import prepare_index
from tests.workers.engine import megatron_cases
from verl.model_merger.__main__ import main

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("merge_megatron")
    megatron_cases.write_models(folder)
    for name in {case["folder"] for case in CASES.values()}:
        file = folder / name / "model.safetensors"
        weights = {key: tensor.bfloat16() for key, tensor in load_file(file).items()}
        save_file(weights, file, metadata={"format": "pt"})
        config = json.loads((folder / name / "config.json").read_text())
        (folder / name / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    spawn_ranks(run_rank, (2, folder))
    return folder


@pytest.fixture(scope="module")
def exported(root: Path) -> dict[str, dict[str, torch.Tensor]]:
    return torch.load(root / "exported.pt")


def run(command: str, folder: Path, *more: object) -> int:
    return main([command, "--backend", "megatron", "--local_dir", str(folder), *map(str, more)])


def loaded(folder: Path, auto: Any) -> Any:
    model, found = auto.from_pretrained(folder, dtype="auto", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and not found["mismatched_keys"]
    return model


@pytest.mark.parametrize("name", UNTRAINED)
def test_untrained_weights_are_the_bytes_of_the_source(root: Path, tmp_path: Path, name: str) -> None:
    source = root / UNTRAINED[name]["folder"]
    assert run("merge", checkpoint_of(root, name), "--target_dir", tmp_path / "hf") == 0
    merged, original = load_file(tmp_path / "hf" / "model.safetensors"), load_file(source / "model.safetensors")
    assert merged.keys() == original.keys()
    for key, tensor in original.items():
        assert merged[key].dtype == tensor.dtype == torch.bfloat16
        assert torch.equal(merged[key].view(torch.int16), tensor.view(torch.int16)), key
    ours, theirs = (loaded(folder, AutoModelForCausalLM) for folder in (tmp_path / "hf", source))
    ids = torch.arange(3, 19).unsqueeze(0)
    assert torch.equal(ours(input_ids=ids).logits, theirs(input_ids=ids).logits)
    assert run("test", checkpoint_of(root, name), "--test_hf_dir", source) == 0


@pytest.mark.parametrize("name", TRAINED)
def test_trained_weights_are_those_of_the_engine(
    root: Path, exported: dict[str, dict[str, torch.Tensor]], tmp_path: Path, name: str
) -> None:
    folder, expected = checkpoint_of(root, name), exported[name]
    assert run("merge", folder, "--target_dir", tmp_path / "hf", "--dtype", "fp32") == 0
    merged = load_file(tmp_path / "hf" / "model.safetensors")
    assert merged.keys() == expected.keys() and all(torch.equal(merged[key], expected[key]) for key in expected)
    is_value = "value" in name
    model = loaded(tmp_path / "hf", AutoModelForTokenClassification if is_value else AutoModelForCausalLM)
    assert model.dtype == torch.float32 and model.config.architectures == [type(model).__name__]
    assert all(torch.equal(tensor, expected[key]) for key, tensor in model.named_parameters())
    assert run("test", folder, "--test_hf_dir", tmp_path / "hf") == 0
    assert run("test", folder, "--test_hf_dir", root / "plain") == 1
    if is_value:
        assert run("test", folder, "--test_hf_dir", tmp_path / "hf", "--is-value-model") == 0


def test_the_output_embedding_is_left_out_when_asked(root: Path, tmp_path: Path) -> None:
    arguments = ("--target_dir", tmp_path / "hf", "--tie-word-embedding")
    assert run("merge", checkpoint_of(root, "plain tp 2"), *arguments) == 0
    original = load_file(root / "plain" / "model.safetensors")
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == original.keys() - {"lm_head.weight"}
    model = loaded(tmp_path / "hf", AutoModelForCausalLM)
    assert torch.equal(model.lm_head.weight, original["model.embed_tokens.weight"])


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)


def _reconfigure(**changes: Any) -> Any:
    def change(path: Path) -> None:
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


CONFIG = "huggingface/config.json"
DAMAGES = {
    "missing shard": ("dist_ckpt/__1_0.distcp", Path.unlink, "dist_ckpt/__1_0.distcp is missing"),
    "cut shard": ("dist_ckpt/__0_0.distcp", _cut, "__0_0.distcp has .* bytes instead of"),
    "changed shard": ("dist_ckpt/__1_0.distcp", _flip, "__1_0.distcp has the right size but the wrong content"),
    "cut index": ("dist_ckpt/.metadata", _cut, "dist_ckpt/.metadata has .* bytes instead of"),
    "no manifest": ("manifest_world_size_2_rank_1.json", Path.unlink, "rank 1 did not finish writing"),
    "no layout": ("megatron_config.json", Path.unlink, "holds no megatron_config.json"),
}
OTHER_MODELS = {
    "fewer layers": (
        _reconfigure(num_hidden_layers=3, layer_types=["full_attention"] * 3),
        "of another model: the checkpoint holds decoder.*of 4 layers",
    ),
    "biases": (
        _reconfigure(architectures=["Qwen3ForCausalLM"], model_type="qwen3"),
        "of another model: the checkpoint",
    ),
    "heads": (_reconfigure(num_attention_heads=8), "of another model: the checkpoint holds decoder.*linear_qkv"),
}


@pytest.mark.parametrize("how", [*DAMAGES, *OTHER_MODELS])
def test_what_is_damaged_or_of_another_model_is_named(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(checkpoint_of(root, "plain tp 2"), broken)
    if how in DAMAGES:
        name, change, message = DAMAGES[how]
        change(broken / name)
    else:
        change, message = OTHER_MODELS[how]
        change(broken / CONFIG)
        for manifest in broken.glob("manifest_*_rank_0.json"):  # as if that model had been saved
            content = json.loads(manifest.read_text())
            content["files"] = [each for each in content["files"] if each["name"] != CONFIG]
            manifest.write_text(json.dumps(content))
    assert run("merge", broken, "--target_dir", tmp_path / "hf") == 2
    said = capsys.readouterr().err
    assert re.search(message, said), said
    assert not (tmp_path / "hf").exists()


def test_a_prepared_index_runs_nothing(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "actor"
    shutil.copytree(checkpoint_of(root, next(iter(UNTRAINED))), folder)
    prepare_index(folder, tmp_path / "made")
    assert run("merge", folder, "--target_dir", tmp_path / "hf") == 2
    assert ".metadata names pathlib.Path.touch, which may run code" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()


def test_the_wrong_folder_or_backend_is_named(root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = checkpoint_of(root, "plain tp 2")
    for local_dir, more, message in (
        (folder.parent, (), f"use one of {folder}"),
        (tmp_path / "nowhere", (), "is not a folder"),
        (folder, ("--is-value-model",), "is not a critic"),
        (folder, ("--merge-lora",), "hold no adapters"),
    ):
        assert run("merge", local_dir, "--target_dir", tmp_path / "hf", *more) == 2
        assert message in capsys.readouterr().err
    assert main(["merge", "--backend", "fsdp", "--local_dir", str(folder), "--target_dir", str(tmp_path / "hf")]) == 2
    assert "use --backend megatron" in capsys.readouterr().err


def test_of_several_processes_the_first_merges(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Established commands launch it by torchrun."""
    monkeypatch.setenv("RANK", "1")
    arguments = ["merge", "--backend", "megatron", "--local_dir", str(tmp_path / "absent"), "--target_dir"]
    assert main([*arguments, str(tmp_path / "merged")]) == 0 and not list(tmp_path.iterdir())
