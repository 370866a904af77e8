"""A critic on FSDP whose files hold a head under another name, or none; Megatron is in test_megatron_engine.py."""

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import Qwen2ForTokenClassification

from tests.workers.engine import cases
from verl.utils.model import load_valuehead_model
from verl.workers.engine import EngineRegistry

HEADS = {
    "of TRL": ("v_head.summary", True),
    "of OpenRLHF": ("value_head", False),
    "of transformers": ("score", True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("engine") / "plain"
    cases.write_model(path)
    return path


def head(name: str, has_bias: bool) -> dict[str, Tensor]:
    weight = torch.randn(1, 64, generator=torch.Generator().manual_seed(2))
    return {f"{name}.weight": weight} | ({f"{name}.bias": torch.tensor([0.3])} if has_bias else {})


def written(folder: Path, at: Path, tensors: dict[str, Tensor], form: str = "one file") -> Path:
    """Write a copy of a model with further tensors."""
    shutil.copytree(folder, at)
    file = at / "model.safetensors"
    if form == "a file of its own":
        save_file(tensors, at / "value_head.safetensors")
    elif form == "pickled":
        torch.save(load_file(file) | tensors, at / "pytorch_model.bin")
        file.unlink()
    else:
        save_file(load_file(file) | tensors, file, metadata={"format": "pt"})
    return at


def values_of(engine: Any) -> Tensor:
    with engine.eval_mode():
        return engine.infer_batch(cases.batch(**cases.MICRO[4]))["values"]


def expected_values(folder: Path, tensors: dict[str, Tensor]) -> Tensor:
    """Compute the values by transformers, with the head on top of the language model's layers."""
    model = Qwen2ForTokenClassification.from_pretrained(folder, num_labels=1).eval()
    named = {f"score.{name.rpartition('.')[2]}": value for name, value in tensors.items()}
    model.load_state_dict({"score.bias": torch.zeros(1)} | named, strict=False)
    data = cases.tensors()
    inputs = {name: data[name] for name in ("input_ids", "attention_mask", "position_ids")}
    with torch.no_grad():
        predicted = model(**inputs).logits[:, -cases.RESPONSE - 1 : -1, 0]
    return predicted * data["response_mask"]


@pytest.mark.parametrize("kind", HEADS)
@pytest.mark.parametrize("form", ["one file", "a file of its own", "pickled"])
def test_a_head_under_another_name_is_loaded(
    folder: Path, tmp_path: Path, kind: str, form: str, caplog: pytest.LogCaptureFixture
) -> None:
    tensors = head(*HEADS[kind])
    path = written(folder, tmp_path / "critic", tensors, form)
    engine = cases.build(path, kind="value_model")
    # 1e-5: attention in another order, in fp32, of values near 1
    torch.testing.assert_close(values_of(engine), expected_values(folder, tensors), atol=1e-5, rtol=1e-5)
    assert "value head" not in caplog.text


def test_a_head_whose_model_transformers_converts_is_loaded(tmp_path: Path) -> None:
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    cases.write_family(tmp_path / "plain", "Qwen3Moe", changes)
    tensors = head("v_head.summary", True)
    engine = cases.build(written(tmp_path / "plain", tmp_path / "critic", tensors), kind="value_model")
    exported = cases.export(engine)
    assert torch.equal(exported["score.weight"], tensors["v_head.summary.weight"])
    assert torch.equal(exported["score.bias"], tensors["v_head.summary.bias"])


@pytest.mark.parametrize("form", ["one file", "pickled"])
@pytest.mark.parametrize("name", ["v_head.0.weight", "my_value_head.weight"])
def test_a_head_that_is_not_read_is_refused_by_name(folder: Path, tmp_path: Path, form: str, name: str) -> None:
    path = written(folder, tmp_path / "critic", {name: torch.ones(1, 64)}, form)
    with pytest.raises(ValueError, match=f"model.path={path}: it holds '{name}', of a value head"):
        cases.build(path, kind="value_model")
    assert cases.build(path)  # a policy has no value head


def test_a_pickled_head_under_another_name_is_refused_by_the_established_loader(folder: Path, tmp_path: Path) -> None:
    path = written(folder, tmp_path / "critic", head("value_head", False), "pickled")
    with pytest.raises(ValueError, match=r"as value_head\.weight: rename it to score\.weight"):
        load_valuehead_model(str(path), torch.float32, cases.tiny_config())


@pytest.mark.parametrize("form", ["one file", "pickled"])
def test_a_pickled_file_of_its_own_is_refused(folder: Path, tmp_path: Path, form: str) -> None:
    path = written(folder, tmp_path / "critic", {}, form)
    torch.save(head("v_head.summary", True), path / "value_head.bin")
    with pytest.raises(ValueError, match=r"it holds value_head\.bin: save this head as value_head\.safetensors"):
        cases.build(path, kind="value_model")


@pytest.mark.parametrize("form", ["one file", "pickled"])
def test_a_new_head_is_told_once(folder: Path, tmp_path: Path, form: str, caplog: pytest.LogCaptureFixture) -> None:
    path = written(folder, tmp_path / "critic", {}, form)
    with caplog.at_level(logging.WARNING, logger="verl.workers.engine.weights"):
        engine = cases.build(path, kind="value_model")
    assert caplog.text.count(f"model.path={path}: it holds no value head: a new one starts at random") == 1
    assert cases.export(engine)["score.weight"].std() > 0.01


def test_a_reward_model_reads_the_same_heads(folder: Path, tmp_path: Path) -> None:
    def built(path: Path) -> Any:
        settings = cases.FSDPEngineConfig(**cases.IN_FP32, forward_only=True)
        model = cases.model_config(path)
        engine = EngineRegistry.new("reward_model", "fsdp", model_config=model, engine_config=settings)
        engine.initialize()
        return engine

    tensors = head("value_head", False)
    found = cases.export(built(written(folder, tmp_path / "judge", tensors)))
    assert torch.equal(found["score.weight"], tensors["value_head.weight"]) and not found["score.bias"].any()
    with pytest.raises(ValueError, match=r"lacks 1 tensors of the model, the first is 'score\.weight'"):
        built(folder)


@pytest.mark.parametrize("form", ["one file", "pickled"])
@pytest.mark.parametrize("change", ["renamed", "truncated", "untied"])
def test_a_policy_whose_files_lack_tensors_is_refused(folder: Path, tmp_path: Path, form: str, change: str) -> None:
    """A checkpoint under other names, one of fewer layers, and one without its head."""
    tensors = load_file(folder / "model.safetensors")
    lost = {"renamed": "layers.1.mlp", "truncated": "layers.1.", "untied": "lm_head"}[change]
    kept = {name.replace(lost, "layers.1.ffn") if change == "renamed" else name: value
            for name, value in tensors.items() if change == "renamed" or lost not in name}  # fmt: skip
    path = written(folder, tmp_path / "policy", {})
    save_file(kept, path / "model.safetensors", metadata={"format": "pt"})
    if form == "pickled":
        (path / "model.safetensors").unlink()
        torch.save(kept, path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=f"the checkpoint lacks .* tensors of the model, the first is '.*{lost}"):
        cases.build(path)
