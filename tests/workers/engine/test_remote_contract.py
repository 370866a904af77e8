"""Families with remote code give what the model alone gives for each row, whatever the layout.

The models are the stand-ins of ``tests/remote_code`` for Kimi-VL and MiniCPM-o.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests import remote_code
from tests.ranks import Ranks
from tests.workers.engine import cases
from tests.workers.engine import remote_cases as remote
from verl.models.transformers import remote as adapters
from verl.utils.checkpoint import hf_export
from verl.workers.config import FSDPEngineConfig
from verl.workers.engine.fsdp import FSDPEngine

ATOL = 1e-5  # of fp32 sums of some hundred terms, in another order
TRUST = {"trust_remote_code": True}

Results = Callable[[bool], dict[int, list[dict[Any, Any]]]]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("remote")
    for family in (*remote.FAMILIES, "deepseek_v3"):
        remote_code.write_model(path / family, family)
    return path


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    """The quick cases or the others, each run once for each world size: world -> rank -> case."""

    @cache
    def run(quick: bool) -> dict[int, list[dict[Any, Any]]]:
        names, store = tuple(remote.QUICK if quick else remote.FULL), str(root / f"store_{quick}")
        two = Ranks(remote.run_world, (2, root, store, names), nprocs=2)
        remote.run_world(0, 1, root, store, names)
        two.join()
        return {world: [torch.load(f"{store}_{world}_{rank}.pt") for rank in range(world)] for world in (1, 2)}

    return run


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, Any]:
    return {family: remote.reference(root / family, family) for family in remote.FAMILIES}


def assert_equal(parts: list[dict[str, Any]], expected: dict[str, Any], mask: Tensor) -> None:
    for part in parts:
        for name, value in part["output"].items():
            torch.testing.assert_close(value, expected["output"][name][part["rows"]], atol=ATOL, rtol=1e-5)
            assert (value[mask[part["rows"]] == 0] == 0).all()
        assert part["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        assert set(part["gradients"]) == set(expected["gradients"])
        for name, gradient in part["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], atol=ATOL, rtol=1e-4, msg=name)


def is_tower(name: str) -> bool:
    return name.startswith(("vision_tower", "vpm"))


def worlds(*names: str) -> list[Any]:
    table = remote.QUICK | remote.FULL
    return [
        pytest.param(family, name, world, marks=() if name in remote.QUICK else pytest.mark.full)
        for family in remote.FAMILIES
        for name in names or (name for name in table if name not in ("frozen", "lora"))
        for world in (1, 2)
        if table[name].get("only_world", world) == world
    ]


@pytest.mark.parametrize(("family", "name", "world"), worlds())
def test_equals_the_model_alone(
    results: Results, references: Any, root: Path, family: str, name: str, world: int
) -> None:
    """Outputs, metrics, gradient norm and every element of the gradient, those of the tower among them."""
    expected = references[family]
    assert any(is_tower(key) and g.abs().max() > 1e-4 for key, g in expected["gradients"].items())
    mask = remote.rows(root / family, family)[0]["response_mask"]
    parts = [rank[family, name] for rank in results(name in remote.QUICK)[world]]
    assert_equal(parts, expected, mask)
    stored = load_file(root / family / "model.safetensors")
    unread = {key for key in stored if key.endswith("e_score_correction_bias")}  # verl routes without it
    for part in parts:
        assert part["before"].keys() == stored.keys() - unread
        assert all(torch.equal(tensor, stored[key]) for key, tensor in part["before"].items())
        assert all(not torch.equal(tensor, stored[key]) for key, tensor in part["weights"].items())


@pytest.mark.parametrize(("family", "name", "world"), worlds("frozen"))
def test_a_frozen_tower_keeps_its_weights(
    results: Results, references: Any, root: Path, family: str, name: str, world: int
) -> None:
    expected = references[family]
    gradients = {key: g for key, g in expected["gradients"].items() if not is_tower(key)}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    parts = [rank[family, name] for rank in results(False)[world]]
    shown = {"output": expected["output"], "metrics": expected["metrics"] | {"grad_norm": norm}, "gradients": gradients}
    assert_equal(parts, shown, remote.rows(root / family, family)[0]["response_mask"])
    for part in parts:
        changed = {key for key, tensor in part["weights"].items() if not torch.equal(tensor, part["before"][key])}
        assert changed and part["before"].keys() - changed == set(filter(is_tower, part["before"]))


@pytest.mark.parametrize(("family", "name", "world"), worlds("lora"))
def test_adapters_start_at_the_model_alone(
    results: Results, references: Any, family: str, name: str, world: int
) -> None:
    """The second factor of an adapter is zero at first, so it alone has a gradient; the tower has no adapter."""
    for part in (rank[family, name] for rank in results(False)[world]):
        for key, value in part["output"].items():
            torch.testing.assert_close(value, references[family]["output"][key][part["rows"]], atol=ATOL, rtol=1e-5)
        assert part["gradients"].keys() and all("lora_" in key and not is_tower(key) for key in part["gradients"])
        assert all((g.abs().max() > 0) == ("lora_B" in key) for key, g in part["gradients"].items())


def test_the_stand_in_computes_what_transformers_computes(root: Path) -> None:
    """Its language model is DeepSeek-V3, which transformers has."""
    folder, models = root / "deepseek_v3", []
    for trust in (True, False):
        model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=trust, attn_implementation="eager")
        models.append(model.eval())
    assert [adapters.has_remote_code(model) for model in models] == [True, False]
    tensors = remote.rows(root / "kimi_vl", "kimi_vl")[0]
    inputs = {name: tensors[name] for name in ("input_ids", "attention_mask", "position_ids")}
    own, native = (model(**inputs).logits[inputs["attention_mask"].bool()] for model in models)
    assert own.std() > 0.1
    torch.testing.assert_close(own, native, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("family", remote.FAMILIES)
def test_the_tower_runs_once_over_what_rows_share(root: Path, family: str) -> None:
    """Samples of a prompt have its images; MiniCPM-o's code alone would run its tower on two slices at a time."""
    engine = cases.build(root / family, TRUST)
    tower = engine.base_model.vision_tower if family == "kimi_vl" else engine.base_model.vpm
    seen: list[int] = []
    tower.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    with engine.eval_mode():
        engine.infer_batch(remote.batch(root / family, family, [2, 2, 0, 4, 1, 2, 4, 0]))
        engine.infer_batch(remote.batch(root / family, family, [1, 5]))
    assert seen == ([16 + 32 + 24 + 36, 4] if family == "kimi_vl" else [2 + 1 + 1, 1])  # patches, or slices; blank
    assert "vision_batch_size" not in vars(engine.base_model.config) or engine.base_model.config.vision_batch_size == 2


def test_an_image_token_that_the_model_wrote_is_text(root: Path) -> None:
    """An ordinary token with the same embedding gives the same log-probabilities."""
    folder, twin = root / "kimi_vl", 85
    pad = remote_code.load(folder).config.media_placeholder_token_id
    for packed in (True, False):
        engine = cases.build(folder, TRUST | {"use_remove_padding": packed})
        with torch.no_grad():
            weight = engine.base_model.get_input_embeddings().weight
            weight[twin] = weight[pad]
        outputs = []
        for token in (twin, pad):
            data = remote.batch(folder, "kimi_vl", [0, 2])
            data.batch["input_ids"][:, -remote.RESPONSE] = token
            data.batch["responses"][:, 0] = token
            with engine.eval_mode():
                outputs.append(engine.infer_batch(data)["log_probs"][:, 1:])
        torch.testing.assert_close(*outputs, atol=1e-6, rtol=1e-6)


def test_rows_and_images_that_do_not_fit_are_named(root: Path) -> None:
    for family, wrong in (("kimi_vl", "6 image tokens, .* gives 9 features"), ("minicpmo", "no placeholders")):
        engine = cases.build(root / family, TRUST)
        swapped = remote.batch(root / family, family, [0, 4])
        shown = swapped.non_tensor_batch["multi_modal_inputs"]
        shown[:] = [shown[1], None]
        with engine.eval_mode(), pytest.raises(ValueError, match=wrong):
            engine.infer_batch(swapped.select_idxs([0]) if family == "kimi_vl" else swapped)
    engine = cases.build(root / "kimi_vl", TRUST)
    without = remote.batch(root / "kimi_vl", "kimi_vl", [0])
    del without.non_tensor_batch["multi_modal_inputs"]
    with engine.eval_mode(), pytest.raises(ValueError, match="6 image tokens, .* has no pixel_values"):
        engine.infer_batch(without)


@pytest.mark.parametrize("family", remote.FAMILIES)
def test_an_exported_folder_holds_the_code(root: Path, tmp_path: Path, family: str) -> None:
    """Its own code loads it, with the weights of training; with adapters the code is that of the model below them."""
    tokenizer = AutoTokenizer.from_pretrained(root / family, trust_remote_code=True)
    for options in ({}, remote.LORA):
        folder = tmp_path / f"{family}_{bool(options)}"
        folder.mkdir()
        engine = cases.build(root / family, TRUST | options)
        hf_export.save_config_and_tokenizer(folder, engine.module, tokenizer)
        hf_export.export_weights(folder, engine.named_weights())
        loaded = remote_code.load(folder).state_dict()
        stored = load_file(root / family / "model.safetensors")
        assert loaded and all(torch.equal(tensor, stored[name]) for name, tensor in loaded.items())


# What remote code cannot do is refused before it trains


def test_attention_that_does_not_tell_sequences_apart_is_refused(
    root: Path, results: Results, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(adapters, "_pack_attention", lambda model: None)
        with pytest.raises(ValueError, match="KimiVL.* sees sequences .* by .*Write use_remove_padding=False"):
            cases.build(root / "kimi_vl", TRUST)
    for rank in results(True)[2]:
        assert "ulysses_sequence_parallel_size=2: in " in rank["refusal"] and "does not reach" in rank["refusal"]


def test_text_models_with_code_of_their_own(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They train padded, are checked, and are refused where their code cannot take packed sequences."""
    folder = root / "deepseek_v3"
    greedy = TRUST | {"override_config": {"topk_method": "greedy"}}
    with pytest.raises(ValueError, match="use_remove_padding=True: .* no attention for packed .* trust_remote_code"):
        cases.build(folder, greedy)
    eager = {"override_config": greedy["override_config"] | {"attn_implementation": "eager"}}
    with pytest.raises(ValueError, match="DeepseekV3ForCausalLM, .* takes no packed sequences: write False"):
        cases.build(folder, greedy | eager)
    padded = greedy | eager | {"use_remove_padding": False}
    engine = cases.build(folder, padded)
    with engine.eval_mode():
        found = engine.infer_batch(cases.batch())["log_probs"]
    expected = cases.reference_loss(remote_code.load(folder).eval())[1]["log_probs"]
    torch.testing.assert_close(found, expected.detach(), atol=ATOL, rtol=1e-5)
    plain = type(engine.base_model.model).forward
    monkeypatch.setattr(
        type(engine.base_model.model),
        "forward",
        lambda self, **inputs: plain(self, **inputs | {"attention_mask": None}),
    )
    with pytest.raises(ValueError, match="sees the padding before a sequence: .*Write use_remove_padding=True"):
        cases.build(folder, padded)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("family", remote.FAMILIES)
def test_a_module_that_the_caller_has_built(root: Path, references: Any, family: str, packed: bool) -> None:
    config = FSDPEngineConfig(strategy="fsdp")
    engine = FSDPEngine.from_module(remote_code.load(root / family), None, remove_padding=packed, engine_config=config)
    with engine.eval_mode():
        found = engine.infer_batch(remote.batch(root / family, family, [0, 3, 5]))["log_probs"]
    torch.testing.assert_close(found, references[family]["output"]["log_probs"][[0, 3, 5]], atol=ATOL, rtol=1e-5)
