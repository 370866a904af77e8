"""Every loss on Megatron-Core has the gradient that it has on the FSDP engine, and the ratio 1 on-policy.

``test_loss_invariance.py`` holds that one to its definition and to every cut. Tolerances are those of that file.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.special_e2e.verification import record
from tests.workers.engine import cases, loss_cases, megatron_cases, megatron_loss_cases, real_losses
from tests.workers.engine.loss_cases import COMBINATIONS, LOSSES, VALUE, VALUES
from tests.workers.engine.megatron_loss_cases import ALL, LAYOUT_OF, TWO
from tests.workers.engine.test_loss_invariance import TOLERANCE, distance_to

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")

Found = dict[Any, Any]
LONGEST_S = 1200.0  # of the ranks of one world, on two cores


def full(test: Any) -> Any:
    """Mark what needs the whole matrix, which the first test waits for."""
    return pytest.mark.full(pytest.mark.timeout(2 * LONGEST_S + 60)(test))


def run(folder: Path, plan: megatron_loss_cases.Plan) -> Found:
    """Return the reference, and what every rank found by layout and cut."""
    cases.write_model(folder, **megatron_cases.LAYERS)
    ranks = Ranks(megatron_loss_cases.run_layouts, (2, folder, plan), nprocs=2)
    found: Found = {"folder": folder, "reference": megatron_loss_cases.run_reference(folder, plan)}
    ranks.join(timeout_s=LONGEST_S)
    if any(LAYOUT_OF[layout][0] == 4 for layout, _ in plan):
        Ranks(megatron_loss_cases.run_layouts, (4, folder, plan), nprocs=4).join(timeout_s=LONGEST_S)
    for layout, cut in plan:
        world = LAYOUT_OF[layout][0]
        files = [folder / f"megatron_losses_{world}_{rank}.pt" for rank in range(world)]
        found[layout, cut] = [torch.load(file)[layout, cut] for file in files]
    return found


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("two"), TWO)


@pytest.fixture(scope="module")
def every(tmp_path_factory: pytest.TempPathFactory) -> Found:
    return run(tmp_path_factory.mktemp("every"), ALL)


def reference_of(found: Found, parts: list[Found], each: tuple[str, str]) -> Found:
    """Return the FSDP engine's; for the critic, whose head an engine draws, that of the definition."""
    if each[0] != VALUE:
        return found["reference"][each]
    model = cases.value_reference(found["folder"], parts[0]["head"], **megatron_cases.LAYERS)
    wanted = real_losses.reference(model, "value_model", each[1])
    named = wanted["gradients"]
    return {"metrics": wanted["metrics"], "names": sorted(named), "gradient": loss_cases.as_vector(named)}


def assert_same(found: Found, place: tuple[str, str], each: tuple[str, str]) -> float:
    """Compare gradient and metrics on every rank; returns the largest deviation of a gradient."""
    want = reference_of(found, found[place], each)
    assert want["gradient"].norm() > 1e-3
    distances = [distance_to(want, rank[each]) for rank in found[place]]
    assert max(distances) < TOLERANCE, f"{place}, {each}: {max(distances):.1e}"
    for rank in found[place]:
        assert rank[each]["metrics"] == pytest.approx(want["metrics"], rel=1e-5, abs=1e-6), f"{place}, {each}"
    return max(distances)


def assert_ratio_is_one(found: Found, place: tuple[str, str]) -> float:
    """Bit for bit in the same partition; within 1e-6 of the FSDP engine's, and returns how far from it."""
    checks = [equal for rank in found[place] for equal in rank["on policy"]["equal"]]
    assert checks and all(checks)
    furthest = 0.0
    for rank in found[place]:
        for loss in LOSSES:
            assert rank["on policy"][loss] == {"pg_clipfrac": 0, "pg_clipfrac_lower": 0, "ppo_kl": 0}, loss
        here = rank["on policy"]["log_probs"][:, : cases.RESPONSE].double()
        ratio = (here - found["reference"]["log_probs"][rank["rows"]].double()).exp()
        furthest = max(furthest, float(ratio.sub(1).abs().max()))
    assert furthest <= 1e-6
    return furthest


@pytest.mark.parametrize(("layout", "cut"), TWO)
def test_a_loss_has_the_gradient_of_the_fsdp_engine(two: Found, layout: str, cut: str) -> None:
    for each in TWO[layout, cut]:
        assert_same(two, (layout, cut), each)


@pytest.mark.parametrize(("layout", "cut"), TWO)
def test_the_ratio_is_one_on_policy(two: Found, layout: str, cut: str) -> None:
    assert_ratio_is_one(two, (layout, cut))


@full
@pytest.mark.parametrize(("loss", "mode"), COMBINATIONS + VALUES)
def test_every_loss_on_every_layout(every: Found, verification_page: Path | None, loss: str, mode: str) -> None:
    found = {place: assert_same(every, place, (loss, mode)) for place in ALL}
    worst = max(found, key=lambda place: found[place])
    record(
        verification_page,
        "## Losses on Megatron-Core",
        [f"{loss}, {mode}", f"{found[worst]:.1e}", ", ".join(worst)],
    )


@full
def test_the_ratio_is_one_on_policy_on_every_layout(every: Found, verification_page: Path | None) -> None:
    found = {place: assert_ratio_is_one(every, place) for place in ALL}
    worst = max(found, key=lambda place: found[place])
    record(
        verification_page,
        "## Losses on Megatron-Core",
        ["ratio on-policy less 1, every loss", f"{found[worst]:.1e}", ", ".join(worst)],
    )
