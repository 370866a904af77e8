"""Images and videos change nothing about the contract: one gradient, whatever the cut, the layout and the packing.

Each case runs on batches that mix rows of text alone, one image, several images, a video and both.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import Ranks
from tests.workers.engine import cases
from tests.workers.engine import vision_cases as vision
from verl.workers.engine.fsdp.build import ModelBuilder

FAMILIES = ("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "glm4v")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("vision")
    for name in (*FAMILIES, "tied"):
        family = "qwen2_5_vl" if name == "tied" else name
        vision.write_model(path / name, family, tied=name == "tied")
        tensors, media = vision.rows(family)
        torch.save(vision.positions(vision.load(path / name), tensors, media), path / name / "positions.pt")
    return path


@pytest.fixture(scope="module")
def results(root: Path) -> dict[int, list[dict[str, Any]]]:
    """All cases, run once for each world size: world -> rank -> case."""
    two = Ranks(vision.run_world, (2, root, str(root / "store")), nprocs=2)
    vision.run_world(0, 1, root, "")
    two.join()
    return {world: [torch.load(root / f"world_{world}_rank_{rank}.pt") for rank in range(world)] for world in (1, 2)}


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, Any]:
    families = {name: "qwen2_5_vl" if name == "tied" else name for name in (*FAMILIES, "tied")}
    return {name: vision.reference(vision.load(root / name), family) for name, family in families.items()}


def test_the_reference_of_glm_is_its_own_forward(root: Path, references: Any) -> None:
    """On the rows with images alone, and on the row with a video alone, which its forward takes."""
    model = vision.load(root / "glm4v")
    tensors, media = vision.rows("glm4v")
    positions = torch.load(root / "glm4v" / "positions.pt")
    for rows in ([0, 1, 2, 5, 6, 7], [3]):
        logits = model(
            input_ids=tensors["input_ids"][rows],
            attention_mask=tensors["attention_mask"][rows],
            position_ids=positions[rows].transpose(0, 1),
            **vision.join([media[row] for row in rows]),
        ).logits[:, -vision.RESPONSE - 1 : -1]
        scores = torch.log_softmax(logits / cases.TEMPERATURE, dim=-1)
        chosen = scores.gather(-1, tensors["responses"][rows].unsqueeze(-1)).squeeze(-1)
        expected = references["glm4v"]["output"]["log_probs"][rows]
        torch.testing.assert_close(chosen * tensors["response_mask"][rows], expected, atol=vision.ATOL, rtol=1e-5)


def parts_of(results: Any, name: str, world: int) -> list[dict[str, Any]]:
    return [rank[name] for rank in results[world]]


def assert_equal(parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    mask = vision.rows("qwen2_5_vl")[0]["response_mask"]
    for part in parts:
        assert set(part["output"]) == set(expected["output"])
        for name, value in part["output"].items():
            torch.testing.assert_close(value, expected["output"][name][part["rows"]], atol=vision.ATOL, rtol=1e-5)
            assert (value[mask[part["rows"]] == 0] == 0).all()
        assert part["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        assert part["metrics"] == parts[0]["metrics"]
        assert_gradients(part["gradients"], expected["gradients"])


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=vision.ATOL, rtol=1e-4, msg=name)


def worlds(table: dict[str, dict[str, Any]]) -> list[tuple[str, int]]:
    return [(name, world) for name, case in table.items() for world in (1, 2) if case.get("only_world", world) == world]


@pytest.mark.parametrize(("name", "world"), worlds(vision.CASES))
def test_equals_plain_transformers(results: Any, references: Any, name: str, world: int) -> None:
    """Outputs, metrics, gradient norm and every element of the gradient, those of the tower among them."""
    expected = references[vision.folder_of(vision.CASES[name])]
    assert any(".visual." in key and g.abs().max() > 1e-4 for key, g in expected["gradients"].items())
    assert_equal(parts_of(results, name, world), expected)


@pytest.mark.parametrize(("name", "world"), [(n, w) for n, w in worlds(vision.OTHERS) if n.startswith("frozen")])
def test_a_frozen_tower_keeps_its_weights(results: Any, references: Any, name: str, world: int) -> None:
    expected = references["qwen2_5_vl"]
    gradients = {key: g for key, g in expected["gradients"].items() if ".visual." not in key}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    metrics = expected["metrics"] | {"grad_norm": norm}
    parts = parts_of(results, name, world)
    assert_equal(parts, {"output": expected["output"], "metrics": metrics, "gradients": gradients})
    for part in parts:
        changed = {key for key, tensor in part["weights"].items() if not torch.equal(tensor, part["before"][key])}
        assert changed and not any("visual" in key for key in changed)
        assert all("visual" in key for key in part["before"].keys() - changed)


@pytest.mark.parametrize(("name", "world"), [(n, w) for n, w in worlds(vision.OTHERS) if n.startswith("lora")])
def test_adapters_leave_out_what_is_excluded_or_frozen(results: Any, root: Path, name: str, world: int) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    parts = parts_of(results, name, world)
    excluded = None if name == "lora, all" else r".*visual.*"
    config = LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", exclude_modules=excluded, task_type="CAUSAL_LM")
    model = get_peft_model(vision.load(root / "qwen2_5_vl"), config)
    assert not set_peft_model_state_dict(model, parts[0]["adapter"]).unexpected_keys
    inner = model.base_model.model
    model.model = inner.model
    expected = vision.reference(model, "qwen2_5_vl")
    assert any("visual" in key for key in parts[0]["adapter"]) == (excluded is None)
    assert_equal(parts, expected)


@pytest.mark.parametrize(("name", "world"), [(n, w) for n, w in worlds(vision.OTHERS) if n.startswith("value")])
def test_value_head(results: Any, root: Path, name: str, world: int) -> None:
    from verl.utils.model import get_value_model_class

    parts = parts_of(results, name, world)
    family = vision.OTHERS[name].get("family", "qwen2_5_vl")
    head = {key: tensor for key, tensor in parts[0]["before"].items() if key.startswith("score")}
    assert set(head) == {"score.weight", "score.bias"} and head["score.weight"].std() > 0.01
    config = vision.load(root / family).config
    config.num_labels = 1
    model = get_value_model_class(config).from_pretrained(str(root / family), config=config)
    assert not model.load_state_dict(head, strict=False).unexpected_keys
    assert_equal(parts, vision.reference(model, family, value_model=True))


@pytest.mark.parametrize("name", ["packed", "tied", "qwen2_vl", "qwen3_vl", "glm4v, no image on rank 1"])
def test_exports_what_save_pretrained_writes(results: Any, root: Path, name: str) -> None:
    from safetensors.torch import load_file

    stored = load_file(root / vision.folder_of(vision.CASES[name]) / "model.safetensors")
    for world in (1, 2):
        for part in parts_of(results, name, world):
            assert set(part["before"]) == set(stored)
            assert all(torch.equal(part["before"][key], stored[key]) for key in stored)
            assert all(not torch.equal(part["weights"][key], stored[key]) for key in stored)


@pytest.mark.parametrize("packed", [True, False])
def test_the_tower_sees_once_what_rows_share(root: Path, packed: bool) -> None:
    """Samples of a prompt have its images; with copies of them instead, the numbers are the same."""
    engine = cases.build(root / "qwen3_vl", {"use_remove_padding": packed})
    seen: list[int] = []
    engine.base_model.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    outputs = []
    for copied in (False, True):
        data = vision.batch(root / "qwen3_vl", "qwen3_vl", [2, 2, 0, 4, 1, 2, 4, 0])
        shown = data.non_tensor_batch["multi_modal_inputs"]
        if copied:
            shown[:] = [dict(row) if row else row for row in shown]
        with engine.eval_mode():
            outputs.append(engine.infer_batch(data)["log_probs"])
    patches = [24 + 8, 0, 16 + 32 + 8, 0, 48 + 16]  # of the rows
    assert seen == [sum(patches), 2 * patches[0] + 3 * patches[2] + 2 * patches[4]]
    torch.testing.assert_close(*outputs, atol=vision.ATOL, rtol=1e-5)


FIRST = -vision.RESPONSE
"""Column of the first token of the response."""


@pytest.mark.parametrize(
    ("family", "token", "column"),
    [
        ("qwen2_5_vl", vision.IMAGE, FIRST),
        ("glm4v", vision.IMAGE, FIRST),
        ("glm4v", vision.VIDEO_START, FIRST),
        ("glm4v", vision.VIDEO_START, FIRST - 1),  # a prompt that leaves a video open
    ],
)
def test_tokens_that_stand_for_no_image_are_text(root: Path, family: str, token: int, column: int) -> None:
    """A tower has nothing for them; an ordinary token with the same embedding gives the same log-probabilities."""
    folder, twin, index = root / family, 85, [5, 6]  # no tool shows an image after the token
    for packed in (True, False):
        engine = cases.build(folder, {"use_remove_padding": packed})
        with torch.no_grad():
            weight = engine.base_model.get_input_embeddings().weight
            weight[twin] = weight[token]
        outputs = []
        for written in (twin, token):
            data = vision.batch(folder, family, index)
            data.batch["input_ids"][:, column] = written
            if column == FIRST:
                data.batch["responses"][:, 0] = written
            with engine.eval_mode():
                outputs.append(engine.infer_batch(data)["log_probs"][:, 1:])
        assert outputs[0].abs().max() > 1
        torch.testing.assert_close(outputs[0], outputs[1], atol=1e-6, rtol=1e-6)


def test_rows_and_images_that_do_not_fit_are_named(root: Path) -> None:
    engine = cases.build(root / "qwen2_5_vl")
    data = vision.batch(root / "qwen2_5_vl", "qwen2_5_vl", [0, 2])
    swapped = vision.batch(root / "qwen2_5_vl", "qwen2_5_vl", [0, 5])
    swapped.non_tensor_batch["multi_modal_inputs"] = data.non_tensor_batch["multi_modal_inputs"]
    with engine.eval_mode(), pytest.raises(ValueError, match="17 image and video tokens, .* gives 22 features"):
        engine.infer_batch(swapped)
    del data.non_tensor_batch["multi_modal_inputs"]
    with engine.eval_mode(), pytest.raises(ValueError, match="22 image tokens, .* has no pixel_values"):
        engine.infer_batch(data)


@pytest.fixture
def no_group_left() -> Iterator[None]:
    """End the group of one process that a wrapped engine starts."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize("wrapped", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_a_family_without_an_entry_runs_as_transformers_does(
    root: Path, references: Any, monkeypatch: pytest.MonkeyPatch, no_group_left: None, packed: bool, wrapped: bool
) -> None:
    """In one process; several are refused, as a rank without an image would not take part."""
    monkeypatch.setattr("verl.models.transformers.vision.VISION_FAMILIES", ())
    engine = cases.build(root / "qwen2_5_vl", {"use_remove_padding": packed}, {"offload_policy": wrapped})
    assert not engine.forward.takes_media
    index = [0, 2, 3, 5]
    with engine.eval_mode():
        output = engine.infer_batch(vision.batch(root / "qwen2_5_vl", "qwen2_5_vl", index, micro_batch_size_per_gpu=2))
    expected = references["qwen2_5_vl"]["output"]["log_probs"][index]
    torch.testing.assert_close(output["log_probs"], expected, atol=vision.ATOL, rtol=1e-5)
    builder = ModelBuilder(engine.model_config, engine.engine_config, replace(engine.layout, world_size=2), False)
    with pytest.raises(ValueError, match="several ranks cannot share"):
        builder.build()
