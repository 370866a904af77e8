"""The gradient of a step is the same however its mini-batch is cut, laid out, packed, ordered and padded.

For every policy loss and aggregation, with entropy and KL terms and importance weights, and for the clipped loss of the
critic; those that select tokens select them anew each time. Tolerance: the engine computes in fp32, where the same sum
in another order differs by about 1e-6 relative; gradients are compared as whole vectors, by the norm of the difference
over the norm.
"""

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.special_e2e.verification import record
from tests.workers.engine import cases, loss_cases, real_losses
from tests.workers.engine.loss_cases import BASE, COMBINATIONS, LOSSES, MODES, VALUES, VARIANTS

TOLERANCE = 1e-5
ALL = [*VARIANTS[1], *VARIANTS[2]]


def run(root: Path, plan: loss_cases.Plan) -> dict[str, list[dict[Any, Any]]]:
    """Run both worlds; returns what every rank found, by variant."""
    folder = root / "plain"
    cases.write_model(folder)
    two = Ranks(loss_cases.run_world, (2, folder, str(root / "store"), plan), nprocs=2)
    loss_cases.run_world(0, 1, folder, "", plan)
    two.join()
    found: dict[str, list[dict[Any, Any]]] = {}
    for world in (1, 2):
        ranks = [torch.load(folder / f"losses_{world}_{rank}.pt") for rank in range(world)]
        found |= {name: [rank[name] for rank in ranks] for name in VARIANTS[world]}
    found[BASE][0]["folder"] = folder
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[Any, Any]]]:
    return run(tmp_path_factory.mktemp("pairwise"), loss_cases.joined(loss_cases.pairwise(), loss_cases.some_values()))


@pytest.fixture(scope="module")
def all_results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[Any, Any]]]:
    return run(tmp_path_factory.mktemp("full"), loss_cases.full(COMBINATIONS + VALUES))


def distance_to(want: dict[str, Any], found: dict[str, Any]) -> float:
    assert found["names"] == want["names"]
    return float((found["gradient"] - want["gradient"]).norm() / want["gradient"].norm())


def assert_same(found: dict[str, list[dict[Any, Any]]], variant: str, each: tuple[str, str]) -> None:
    (base,) = found[BASE]
    want = base[each]
    assert want["gradient"].norm() > 1e-3
    for rank in found[variant]:
        distance = distance_to(want, rank[each])
        assert distance < TOLERANCE, f"{variant}, {each}: {distance:.1e}"
        assert rank[each]["metrics"] == pytest.approx(want["metrics"], rel=1e-5, abs=1e-6), f"{variant}, {each}"


def test_the_selection_pairs_each_with_each() -> None:
    plan = loss_cases.pairwise()
    assert set(plan) == set(ALL) and plan[BASE] == COMBINATIONS
    for name in ALL:
        assert {loss for loss, _ in plan[name]} == set(LOSSES)
        assert {mode for _, mode in plan[name]} == set(MODES)


@pytest.mark.parametrize("variant", ALL[1:])
def test_a_gradient_depends_on_the_mini_batch_alone(results: Any, variant: str) -> None:
    for each in loss_cases.pairwise()[variant]:
        assert_same(results, variant, each)


@pytest.mark.full
@pytest.mark.parametrize("variant", ALL[1:])
def test_every_combination(all_results: Any, variant: str) -> None:
    for each in COMBINATIONS + VALUES:
        assert_same(all_results, variant, each)


@pytest.mark.full
@pytest.mark.parametrize(("loss", "mode"), COMBINATIONS + VALUES)
def test_the_largest_deviation_of_a_loss(
    all_results: Any, verification_page: Path | None, loss: str, mode: str
) -> None:
    """The table of what the whole matrix shows."""
    want = all_results[BASE][0][loss, mode]
    found = {name: max(distance_to(want, rank[loss, mode]) for rank in all_results[name]) for name in ALL[1:]}
    worst = max(found, key=lambda name: found[name])
    record(verification_page, "## Losses", [f"{loss}, {mode}", f"{found[worst]:.1e}", worst])
    assert found[worst] < TOLERANCE


@pytest.mark.parametrize("variant", loss_cases.some_values())
def test_a_gradient_of_the_critic_depends_on_the_mini_batch_alone(results: Any, variant: str) -> None:
    for each in loss_cases.some_values()[variant]:
        assert_same(results, variant, each)
        assert results[variant][0][each]["metrics"]["critic/vf_clipfrac"] > 0.1


@pytest.mark.parametrize(("loss", "mode"), VALUES)
def test_the_loss_of_the_critic_is_that_of_its_definition(results: Any, loss: str, mode: str) -> None:
    (base,) = results[BASE]
    wanted = real_losses.reference(cases.value_reference(base["folder"], base["head"]), "value_model", mode)
    assert base[loss, mode]["metrics"] == pytest.approx(wanted["metrics"], rel=1e-5, abs=1e-6)
    expected = {"names": sorted(wanted["gradients"]), "gradient": loss_cases.as_vector(wanted["gradients"])}
    assert distance_to(expected, base[loss, mode]) < TOLERANCE


def test_the_losses_differ_from_each_other(results: Any) -> None:
    """So that the comparisons above can fail: each loss and aggregation has a gradient of its own, and clips act."""
    (base,) = results[BASE]
    same_model = [each for kind in (COMBINATIONS, VALUES) for each in itertools.combinations(kind, 2)]
    for one, other in same_model:
        distance = distance_to(base[one], base[other])
        assert distance > 100 * TOLERANCE, f"{one}, {other}"
    for loss, mode in COMBINATIONS:
        clips = base[loss, mode]["metrics"]["actor/pg_clipfrac"]
        assert (clips > 0) == (loss not in ("gpg", "kl_cov", "sapo")), loss


@pytest.mark.parametrize("variant", ALL)
def test_on_policy_ratio_is_one(results: Any, variant: str) -> None:
    """Bit for bit in the same partition; within 1e-6 of those of any other."""
    everywhere = results[BASE][0]["on policy"]["log_probs"]
    for rank in results[variant]:
        found = rank["on policy"]
        assert found["equal"] and all(found["equal"])
        for loss in LOSSES:
            assert found[loss] == {"pg_clipfrac": 0, "pg_clipfrac_lower": 0, "ppo_kl": 0}, loss
        here = found["log_probs"][:, : cases.RESPONSE].double()
        assert (here - everywhere[rank["rows"]].double()).exp().sub(1).abs().max() <= 1e-6
