"""The FSDP engine against plain transformers and torch, for every cut, layout and packing.

Tolerances: fp32 with sums of a few hundred terms in another order differs by about 1e-6 relative. AdamW's first step
is about lr x sign(gradient), so weights whose gradient is near zero may differ by up to that; they are compared by the
share that agrees.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import Ranks
from tests.workers.engine import cases, real_losses

ATOL = 1e-5


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("engine")
    cases.write_model(root / "plain")
    cases.write_model(root / "tied", tie_word_embeddings=True)
    cases.write_family(root / "glm4_moe", "Glm4Moe", cases.SIGMOID)
    return root


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[int, list[dict[str, Any]]]:
    """All cases, run once for each world size: world -> rank -> case."""
    two = Ranks(cases.run_world, (2, folder, str(folder / "store")), nprocs=2)
    cases.run_world(0, 1, folder, "")
    two.join()
    return {world: [torch.load(folder / f"world_{world}_rank_{rank}.pt") for rank in range(world)] for world in (1, 2)}


@pytest.fixture(scope="module")
def reference(folder: Path) -> dict[str, Any]:
    from transformers import Qwen2ForCausalLM

    return {name: cases.reference_step(Qwen2ForCausalLM.from_pretrained(folder / name)) for name in ("plain", "tied")}


def assert_output(parts: list[dict[str, Any]], expected: dict[str, Tensor], key: str = "output") -> None:
    for part in parts:
        assert set(part[key]) == set(expected)
        for name, value in part[key].items():
            torch.testing.assert_close(value, expected[name][part["rows"]], atol=ATOL, rtol=ATOL)
            assert (value[cases.tensors()["response_mask"][part["rows"]] == 0] == 0).all()


def assert_step(parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for part in parts:
        assert part["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        assert part["metrics"] == parts[0]["metrics"]
        assert part["version"] == 1 and part["lr"] == cases.LR
        assert_weights(part["weights"], expected["weights"])


def assert_real_loss(parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    for part in parts:
        assert part["real loss"]["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
    assert_gradients(parts, expected)


def assert_gradients(parts: list[dict[str, Any]], expected: dict[str, Any]) -> None:
    """Norm and every element of the gradient of the loss of a role."""
    for part in parts:
        found = part["real loss"]
        assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
        assert found["gradients"].keys() == expected["gradients"].keys()
        for name, gradient in found["gradients"].items():
            torch.testing.assert_close(gradient, expected["gradients"][name], atol=1e-5, rtol=1e-5, msg=name)


def assert_weights(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert set(got) == set(expected)
    for name, tensor in got.items():
        difference = (tensor - expected[name]).abs()
        assert difference.max() <= 2.1 * cases.LR, name
        assert (difference > 1e-4).float().mean() < 0.01, name


def worlds(case: dict[str, Any]) -> list[int]:
    return [world for world in (1, 2) if cases.runs_in(case, world)]


@pytest.mark.parametrize(
    ("name", "world"), [(name, world) for name, case in cases.CASES.items() for world in worlds(case)]
)
def test_equals_plain_transformers(results: Any, reference: Any, name: str, world: int) -> None:
    parts = [rank[name] for rank in results[world]]
    assert_output(parts, reference["plain"]["output"])
    assert_step(parts, reference["plain"])


@pytest.fixture(scope="module")
def real_reference(folder: Path, results: Any) -> dict[str, Any]:
    """What the definitions of the losses give, by kind of model."""
    head = {n: t for n, t in results[1][0]["value"]["before"].items() if n.startswith("score")}
    models = {
        "language_model": real_losses.load(folder / "plain"),
        "value_model": cases.value_reference(folder / "plain", head),
    }
    return {kind: real_losses.reference(model, kind) for kind, model in models.items()}


REAL = cases.CASES | {name: case for name, case in cases.OTHERS.items() if name.startswith("value")}


@pytest.mark.parametrize(("name", "world"), [(name, world) for name, case in REAL.items() for world in worlds(case)])
def test_the_loss_of_a_role_equals_its_definition(results: Any, real_reference: Any, name: str, world: int) -> None:
    """Metrics, gradient norm and every element of the gradient."""
    expected = real_reference[REAL[name].get("kind", "language_model")]
    assert 0 < min(expected["metrics"][key] for key in expected["metrics"] if "clipfrac" in key)
    assert_real_loss([rank[name] for rank in results[world]], expected)


@pytest.mark.parametrize("name", ["packed, micro 1", "hybrid", "ulysses, hybrid"])
def test_every_group_has_the_timeout_of_the_first(results: Any, name: str) -> None:
    for rank in results[2]:
        assert rank[name]["timeouts"] and set(rank[name]["timeouts"]) == {cases.TIMEOUT_S}


@pytest.mark.parametrize(("name", "world"), [("tied", 1), ("tied", 2), ("tied, fused", 2)])
def test_tied_embeddings_stay_one_tensor(results: Any, reference: Any, name: str, world: int) -> None:
    parts = [rank[name] for rank in results[world]]
    assert_output(parts, reference["tied"]["output"])
    assert_step(parts, reference["tied"])
    assert "lm_head.weight" not in parts[0]["weights"]


EXPERTS = [(name, world) for name, case in cases.OTHERS.items() if name.startswith("experts")
           for world in worlds(case)]  # fmt: skip


@pytest.fixture(scope="module")
def of_experts(folder: Path) -> dict[str, Any]:
    """What transformers makes of the model with experts; the bias of its router is a buffer, which no step changes."""
    model = cases.load(folder / "glm4_moe")
    expected = cases.reference_step(model)
    weights = expected["weights"] | cases.saved_buffers(model)
    real = real_losses.reference(cases.load(folder / "glm4_moe"), "language_model")
    return expected | {"weights": cases.under_checkpoint_names(model, weights), "real loss": real}


@pytest.mark.parametrize(("name", "world"), EXPERTS)
def test_experts(results: Any, of_experts: dict[str, Any], folder: Path, name: str, world: int) -> None:
    from safetensors.torch import load_file

    parts = [rank[name] for rank in results[world]]
    assert_output(parts, of_experts["output"])
    assert_step(parts, of_experts)
    assert_gradients(parts, of_experts["real loss"])
    stored = load_file(folder / "glm4_moe" / "model.safetensors")
    for part in parts:
        assert set(part["before"]) == set(stored)
        assert all(torch.equal(part["before"][key], stored[key]) for key in stored)


@pytest.mark.parametrize(("name", "world"), [("value", 1), ("value", 2), ("value, padded", 1), ("value, ulysses", 2)])
def test_value_head(results: Any, folder: Path, name: str, world: int) -> None:
    parts = [rank[name] for rank in results[world]]
    head = {n: t for n, t in parts[0]["before"].items() if n.startswith("score")}
    first = results[1][0]["value"]["before"]
    assert set(head) == {"score.weight", "score.bias"} and head["score.weight"].std() > 0.01
    assert all(torch.equal(tensor, first[n]) for n, tensor in head.items())
    expected = cases.reference_step(cases.value_reference(folder / "plain", head), value_model=True)
    assert_output(parts, expected["output"])
    assert_step(parts, expected)


LORA = [(name, world) for name, case in cases.OTHERS.items() if name.startswith("lora") for world in worlds(case)]


@pytest.mark.parametrize(("name", "world"), LORA)
def test_adapters_train_alone_and_merge(results: Any, folder: Path, name: str, world: int) -> None:
    from peft import LoraConfig, get_peft_model, set_peft_model_state_dict

    base = folder / cases.OTHERS[name].get("folder", "plain")
    parts = [rank[name] for rank in results[world]]
    # peft takes these names for those of the routed experts.
    passed_by = [
        f"{part}.{kind}_proj.weight"
        for part in ("layers.0.mlp", "shared_experts")
        for kind in ("gate", "up", "down")
        if "experts" in name
    ]
    config = LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", target_parameters=passed_by or None, task_type="CAUSAL_LM"
    )
    model = get_peft_model(cases.load(base), config)
    incompatible = set_peft_model_state_dict(model, parts[0]["adapter before"])
    assert not incompatible.unexpected_keys
    expected = cases.reference_step(model)
    assert_output(parts, expected["output"])
    assert_output(parts, cases.reference_step(cases.load(base))["output"], key="base output")
    trained = {n.replace(".default", ""): t for n, t in expected["weights"].items() if ".lora_" in n}
    assert_weights(parts[0]["adapter"], trained)
    assert any(t.abs().max() > 0 for n, t in parts[0]["adapter"].items() if "lora_B" in n)
    assert all(part["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6) for part in parts)
    set_peft_model_state_dict(model, parts[0]["adapter"])
    plain = model.merge_and_unload()
    merged = cases.under_checkpoint_names(plain, plain.state_dict())
    for part in parts:
        assert set(part["weights"]) == set(merged)
        for parameter, tensor in part["weights"].items():
            torch.testing.assert_close(tensor, merged[parameter], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["packed, micro 1", "tied"])
def test_exports_what_save_pretrained_writes(results: Any, folder: Path, name: str) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / cases.OTHERS.get(name, {}).get("folder", "plain") / "model.safetensors")
    for world in (1, 2):
        for rank in results[world]:
            exported = rank[name]["before"]
            assert set(exported) == set(stored)
            assert all(torch.equal(exported[n], stored[n]) for n in stored)
