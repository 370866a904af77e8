"""Vision-language models on Megatron-Core against plain transformers: the vision contract of the FSDP engine.

Rows, losses and tolerances are those of ``test_vision_contract.py``. World 1 and 2 run in CI, world 4 with ``--full``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.workers.engine import cases
from tests.workers.engine import megatron_vision_cases as mcore
from tests.workers.engine import vision_cases as vision
from tests.workers.engine.test_vision_contract import assert_equal
from verl.utils.flops_counter import image_lengths

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")


def of_every_layout(names: Iterable[str]) -> list[Any]:
    """Parameters ``world, layout, name`` of the cases that run there."""
    return [
        pytest.param(world, layout, name, marks=pytest.mark.full if world == 4 else [])
        for world, layouts in mcore.LAYOUTS.items()
        for layout in layouts
        for name in names
        if name in mcore.cases_of(layout)
    ]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("megatron_vision")
    mcore.write_models(path)
    return path


class Results:
    """What the ranks of a world found, run when first asked for; rank 0 of world 2 runs world 1 as well."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._found: dict[int, list[Any]] = {}

    def __call__(self, world: int, layout: str) -> list[dict[str, Any]]:
        if world not in self._found:
            started = max(world, 2)
            Ranks(mcore.run_layouts, (started, self.root), started).join()
            for each in (1, 2) if started == 2 else (started,):
                files = [self.root / f"world_{each}_rank_{rank}.pt" for rank in range(each)]
                self._found[each] = [torch.load(file) for file in files]
        return [rank[layout] for rank in self._found[world]]


@pytest.fixture(scope="module")
def results(root: Path) -> Results:
    return Results(root)


def reference(model: Any, family: str, value_model: bool = False) -> dict[str, Any]:
    found = vision.reference(model, family, value_model)
    found["gradients"] = cases.under_checkpoint_names(model, found["gradients"])
    return found


@pytest.fixture(scope="module")
def references(root: Path) -> dict[str, Any]:
    families = {name: "qwen2_5_vl" if name == "tied" else name for name in (*mcore.FAMILIES, "tied")}
    return {name: reference(vision.load(root / name), family) for name, family in families.items()}


@pytest.mark.parametrize(("world", "layout", "name"), of_every_layout(mcore.CASES))
def test_equals_plain_transformers(results: Results, references: Any, world: int, layout: str, name: str) -> None:
    """Outputs, metrics, gradient norm and every element of the gradient, those of the tower among them.

    All stages of a pipeline count the images that the first one computes, those of samples once.
    """
    expected = references[mcore.folder_of(mcore.CASES[name])]
    assert any("visual." in key and g.abs().max() > 1e-4 for key, g in expected["gradients"].items())
    parts = [rank[name] for rank in results(world, layout)]
    assert_equal(parts, expected)
    _, media = vision.rows(mcore.CASES[name].get("family", "qwen2_5_vl"))
    for part in parts:
        assert sorted(part["images"]) == sorted(image_lengths(media[row] for row in set(part["rows"])))


@pytest.mark.parametrize(("world", "layout", "name"), of_every_layout(["frozen"]))
def test_a_frozen_tower_keeps_its_weights(
    results: Results, references: Any, world: int, layout: str, name: str
) -> None:
    expected = references["qwen2_5_vl"]
    gradients = {key: g for key, g in expected["gradients"].items() if "visual." not in key}
    norm = torch.stack([g.square().sum() for g in gradients.values()]).sum().sqrt().item()
    metrics = expected["metrics"] | {"grad_norm": norm}
    parts = [rank[name] for rank in results(world, layout)]
    assert_equal(parts, {"output": expected["output"], "metrics": metrics, "gradients": gradients})
    for part in parts:
        changed = {key for key, tensor in part["weights"].items() if not torch.equal(tensor, part["before"][key])}
        assert changed == gradients.keys()


@pytest.mark.parametrize(("world", "layout", "name"), of_every_layout(["value"]))
def test_value_head(results: Results, root: Path, world: int, layout: str, name: str) -> None:
    from verl.utils.model import get_value_model_class

    parts = [rank[name] for rank in results(world, layout)]
    head = {key: tensor for key, tensor in parts[0]["before"].items() if key.startswith("score")}
    assert set(head) == {"score.weight", "score.bias"} and head["score.weight"].std() > 0.01
    config = vision.load(root / "qwen2_5_vl").config
    config.num_labels = 1
    model = get_value_model_class(config).from_pretrained(str(root / "qwen2_5_vl"), config=config)
    assert not model.load_state_dict(head, strict=False).unexpected_keys
    assert_equal(parts, reference(model, "qwen2_5_vl", value_model=True))


@pytest.mark.parametrize(
    ("world", "layout", "name"), of_every_layout(["qwen2.5", "qwen2.5, tied", "qwen2", "qwen3", "qwen3 moe"])
)
def test_exports_what_a_published_checkpoint_holds(
    results: Results, root: Path, world: int, layout: str, name: str
) -> None:
    """The stored names and values; stacked experts are transposed, as in the published files of Qwen3-VL."""
    from safetensors.torch import load_file

    stored = load_file(root / mcore.folder_of(mcore.CASES[name]) / "model.safetensors")
    stored = {key: tensor.mT if ".mlp.experts." in key else tensor for key, tensor in stored.items()}
    for part in (rank[name] for rank in results(world, layout)):
        assert set(part["before"]) == set(stored)
        assert all(torch.equal(part["before"][key], stored[key]) for key in stored)
        assert all(not torch.equal(part["weights"][key], stored[key]) for key in stored)


@pytest.mark.parametrize(
    ("layout", "name"), [(layout, name) for layout in mcore.SHARED for name in mcore.SHARED[layout]]
)
def test_samples_of_a_prompt_share_its_images(results: Results, layout: str, name: str) -> None:
    """They give what they give without sharing, and the model sees each token of a common beginning once."""
    for rank in results(2, layout):
        shared, plain = rank[f"{name}, shared"]
        assert 0 < shared["computed"] < shared["tokens"] and plain["computed"] == 0
        assert 0 < sum(shared["images"]) <= sum(plain["images"])  # more rows fit into a micro-batch
        assert shared["metrics"] == pytest.approx(plain["metrics"], rel=1e-5)
        for part in ("output", "gradients"):
            torch.testing.assert_close(shared[part], plain[part], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", mcore.CONTINUED)
def test_a_checkpoint_continues_bit_for_bit(results: Results, root: Path, layout: str) -> None:
    """The tower among it; the Hugging Face folder loads in transformers and holds the same weights."""
    ranks = results(2, layout)
    written = vision.load(root / "checkpoints" / layout / "huggingface")
    saved = cases.under_checkpoint_names(written, dict(written.named_parameters()))
    for rank in ranks:
        found = rank["continued"]
        assert found["restored"] == found["expected"]
        ours, restored = found["weights"]
        assert all(torch.equal(restored[key], tensor) for key, tensor in ours.items())
        assert saved.keys() == found["saved"].keys()
        assert all(torch.equal(tensor, found["saved"][key]) for key, tensor in saved.items())
