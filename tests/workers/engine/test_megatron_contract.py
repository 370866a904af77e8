"""The Megatron-Core engine against plain transformers and torch, on every layout: the contract of the FSDP engine.

Tolerances are those of ``test_engine_contract.py``, whose assertions and references these are. World 1 and 2 run in
CI, world 4 with ``--full``.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import JOIN_TIMEOUT_S, RankError, Ranks
from tests.special_e2e.verification import record
from tests.workers.engine import cases, megatron_cases, real_losses
from tests.workers.engine.test_engine_contract import assert_output, assert_real_loss, assert_step, assert_weights

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")


LONGEST_S = {2: JOIN_TIMEOUT_S, 4: 1500.0}
"""A launch may take so long on two cores."""

FOUR = [pytest.mark.full, pytest.mark.timeout(LONGEST_S[4] + 60)]


def of_every_layout(names: Iterable[str]) -> list[Any]:
    """Parameters ``world, layout, name`` of the cases that run there."""
    return [
        pytest.param(world, layout, name, marks=FOUR if world == 4 else [])
        for world, layouts in megatron_cases.LAYOUTS.items()
        for layout in layouts
        for name in names
        if name in megatron_cases.cases_of(world, layout) or name in megatron_cases.runs_of(layout)
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("megatron")
    megatron_cases.write_models(root)
    return root


class Results:
    """What the ranks of a launch found, run when first asked for; rank 0 of world 2 runs world 1 as well."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._found: dict[tuple[int, str], list[Any]] = {}
        self._failed: dict[tuple[int, str], Exception] = {}

    def __call__(self, world: int, layout: str) -> list[dict[str, Any]]:
        launch = megatron_cases.launch_of(world, layout)
        if (world, launch) in self._failed:
            raise self._failed[world, launch]
        if (world, launch) not in self._found:
            try:
                self._run(max(world, 2), launch)
            except RankError as error:  # a launch that failed is not tried again for every test
                self._failed[world, launch] = error
                raise
        return [rank[layout] for rank in self._found[world, launch]]

    def _run(self, started: int, launch: str) -> None:
        ranks = Ranks(megatron_cases.run_layouts, (started, self.folder, launch), started)
        ranks.join(timeout_s=LONGEST_S[started])
        for world in (1, 2) if started == 2 else (started,):
            files = [self.folder / f"world_{world}_{launch}_rank_{rank}.pt" for rank in range(world)]
            self._found[world, launch] = [torch.load(file) for file in files]


@pytest.fixture(scope="module")
def results(folder: Path) -> Results:
    return Results(folder)


MODELS = sorted({case.get("folder", "plain") for case in megatron_cases.CASES.values()})


@pytest.fixture(scope="module")
def references(folder: Path) -> dict[str, Any]:
    found = {}
    for name in MODELS:
        model = cases.load(folder / name)
        found[name] = cases.reference_step(model)
        weights = found[name]["weights"] | cases.saved_buffers(model)
        found[name]["weights"] = cases.under_checkpoint_names(model, weights)
    return found


@pytest.fixture(scope="module")
def real_references(folder: Path) -> dict[str, Any]:
    found = {}
    for name in MODELS:
        model = cases.load(folder / name)
        found[name] = real_losses.reference(model, "language_model")
        found[name]["gradients"] = cases.under_checkpoint_names(model, found[name]["gradients"])
    return found


POLICIES = [name for name, case in megatron_cases.CASES.items() if "kind" not in case]


@pytest.mark.parametrize(("world", "layout", "name"), of_every_layout(POLICIES))
def test_equals_plain_transformers(
    results: Results, references: Any, real_references: Any, world: int, layout: str, name: str
) -> None:
    parts = [rank[name] for rank in results(world, layout)]
    model = megatron_cases.CASES[name].get("folder", "plain")
    assert_output(parts, references[model]["output"])
    assert_step(parts, references[model])
    assert_real_loss(parts, real_references[model])


@pytest.mark.parametrize(("world", "layout", "name"), of_every_layout(["value"]))
def test_value_head(results: Results, folder: Path, world: int, layout: str, name: str) -> None:
    parts = [rank[name] for rank in results(world, layout)]
    head = {n: t for n, t in parts[0]["before"].items() if n.startswith("score")}
    assert set(head) == {"score.weight", "score.bias"} and head["score.weight"].std() > 0.01
    model = cases.value_reference(folder / "plain", head, **megatron_cases.LAYERS)
    expected = cases.reference_step(model, value_model=True)
    assert_output(parts, expected["output"])
    assert_step(parts, expected)
    again = cases.value_reference(folder / "plain", head, **megatron_cases.LAYERS)
    assert_real_loss(parts, real_losses.reference(again, "value_model"))


@pytest.fixture(scope="module")
def three_steps(folder: Path) -> dict[str, Any]:
    """What torch makes of the steps, by model."""
    return {name: megatron_cases.reference_three_steps(folder, name) for name in ("plain", "qwen3_moe")}


@pytest.mark.parametrize(("world", "layout", "name"), of_every_layout(["three steps"]))
def test_three_steps_of_adamw(results: Results, three_steps: Any, world: int, layout: str, name: str) -> None:
    expected = three_steps[megatron_cases.model_of(world, layout)]
    for rank in results(world, layout):
        for found, wanted in zip(rank[name]["metrics"], expected["metrics"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert rank[name]["weights"].keys() == expected["weights"].keys()
        for key, tensor in rank[name]["weights"].items():
            torch.testing.assert_close(tensor, expected["weights"][key], atol=2e-6, rtol=1e-5, msg=key)


@pytest.mark.parametrize(
    ("world", "layout", "name"),
    of_every_layout([name for name in POLICIES if name != "recompute"]),
)
def test_exports_what_save_pretrained_writes(
    results: Results, folder: Path, world: int, layout: str, name: str
) -> None:
    from safetensors.torch import load_file

    stored = load_file(folder / megatron_cases.CASES[name].get("folder", "plain") / "model.safetensors")
    for rank in results(world, layout):
        exported = rank[name]["before"]
        assert set(exported) == set(stored)
        assert all(torch.equal(exported[n], stored[n]) for n in stored)


@pytest.mark.parametrize(("world", "layout", "name"), of_every_layout(["continued"]))
def test_a_checkpoint_continues_bit_for_bit(results: Results, folder: Path, world: int, layout: str, name: str) -> None:
    from safetensors.torch import load_file

    ranks = results(world, layout)
    written = load_file(megatron_cases.checkpoint_of(folder, world, layout) / "huggingface" / "model.safetensors")
    for rank in ranks:
        found = rank[name]
        assert found["version"] == 1 and found["restored"] == found["expected"] and found["expected"]["lr"] < cases.LR
        ours, restored = found["weights"]
        assert all(torch.equal(restored[key], tensor) for key, tensor in ours.items())
        assert written.keys() == found["saved"].keys()
        assert all(torch.equal(tensor, found["saved"][key]) for key, tensor in written.items())


@pytest.mark.parametrize(
    ("world", "layout", "name"),
    [each for each in of_every_layout(["continued"]) if megatron_cases.earlier(*each.values[:2]) is not None],
)
def test_another_layout_continues(results: Results, world: int, layout: str, name: str) -> None:
    """As the one that saved: the same metrics of the next mini-batch, and by its moments the same weights after it."""
    before = megatron_cases.earlier(world, layout)
    assert before is not None
    there = results(*before)[0][name]
    for rank in results(world, layout):
        metrics, weights = rank[name]["moved"]
        assert metrics == pytest.approx(there["expected"], rel=1e-5, abs=1e-6)
        assert_weights(weights, there["weights"][0])


def furthest(found: dict[str, Any], expected: dict[str, Any]) -> float:
    """Return the largest difference of two sets of tensors, relative where an element is larger than 1."""
    return max(
        float((value - expected[key]).abs().div(expected[key].abs().clamp(min=1)).max()) for key, value in found.items()
    )


def deviations(part: dict[str, Any], expected: dict[str, Any], real: dict[str, Any]) -> dict[str, float]:
    """Return how far a rank is from the reference: output, loss, and norm and elements of the gradient."""
    ours, theirs = part["output"], {key: value[part["rows"]] for key, value in expected["output"].items()}
    found = {key: furthest({key: ours[key]}, theirs) for key in ours}
    loss = part["real loss"]
    found["loss"] = abs(loss["metrics"]["actor/pg_loss"] - real["metrics"]["actor/pg_loss"])
    found["norm"] = abs(loss["norm"] / real["norm"] - 1)
    found["gradient"] = furthest(loss["gradients"], real["gradients"])
    return found


@pytest.mark.full
@pytest.mark.timeout(LONGEST_S[4] + 60)
@pytest.mark.parametrize(
    ("world", "layout"), [(world, layout) for world, layouts in megatron_cases.LAYOUTS.items() for layout in layouts]
)
def test_the_largest_deviation_of_a_layout(
    results: Results, references: Any, real_references: Any, three_steps: Any,
    verification_page: Path | None, world: int, layout: str,
) -> None:  # fmt: skip
    ranks, worst = results(world, layout), dict[str, float]()
    names = [name for name in POLICIES if name in megatron_cases.cases_of(world, layout)]
    for name in names:
        model = megatron_cases.CASES[name].get("folder", "plain")
        for rank in ranks:
            found = deviations(rank[name], references[model], real_references[model])
            worst = {key: max(found.get(key, 0.0), worst.get(key, 0.0)) for key in found | worst}
    expected = three_steps[megatron_cases.model_of(world, layout)]["weights"]
    worst["steps"] = max(furthest(rank["three steps"]["weights"], expected) for rank in ranks)
    columns = ("log_probs", "entropy", "loss", "norm", "gradient", "steps")
    shown = [f"{worst[key]:.1e}" for key in columns]
    record(verification_page, "## Deviations", [f"{world}: {layout}", str(len(names)), *shown])
    assert max(worst.values()) < 1e-5, worst
