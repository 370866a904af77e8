"""Actor, critic and reward model on Megatron-Core: equal to one FSDP process, whatever the layout."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.ranks import Ranks
from tests.workers.roles import megatron_cases as cases

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")

ALL = [
    pytest.param(world, name, marks=[] if world == "two workers" else pytest.mark.full)
    for world, layouts in cases.LAYOUTS.items()
    for name in layouts
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("roles")
    cases.write_models(root)
    return root


@pytest.fixture(scope="module")
def results(folder: Path) -> Any:
    """What the ranks of a world found, run when first asked for: (world, layout) -> rank -> role."""
    found: dict[str, list[Any]] = {}

    def of(world: str, layout: str) -> list[dict[str, Any]]:
        if world not in found:
            size = cases.WORLDS[world]
            ranks = Ranks(cases.run_layouts, (world, folder, str(folder / f"store_{len(found)}")), size)
            ranks.join()
            found[world] = [torch.load(folder / f"{world}, rank {rank}.pt") for rank in range(size)]
        return found[world][:1] if layout == "fsdp" else [rank[layout] for rank in found[world]]

    return of


def collected(parts: list[dict[str, Any]], role: str, key: str) -> torch.Tensor:
    """Join what the driver would: the outputs of the ranks that count, in the order of ranks."""
    return torch.cat([part[role][key] for part in parts if part[role]["counts"]])


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_roles_give_what_one_fsdp_process_gives(results: Any, world: str, layout: str) -> None:
    parts, plain = results(world, layout), results(world, "fsdp")[0]["fsdp"]
    for name in cases.ACTORS:
        if name not in parts[0]:
            continue
        for key, atol in (("old_log_probs", 1e-5), ("entropy", 1e-5), ("after", 2e-4)):
            torch.testing.assert_close(collected(parts, name, key), plain[name][key], atol=atol, rtol=1e-4)
        assert (plain[name]["after"] - plain[name]["old_log_probs"]).abs().max() > 1e-2  # the steps moved something
        for part in parts:
            assert metrics_of(part[name]) == pytest.approx(metrics_of(plain[name]), rel=2e-3, abs=1e-5)
    torch.testing.assert_close(collected(parts, "critic", "values"), plain["critic"]["values"], atol=1e-5, rtol=1e-4)
    for part in parts:
        assert metrics_of(part["critic"]) == pytest.approx(metrics_of(plain["critic"]), rel=2e-3, abs=1e-5)
    scores = collected(parts, "reward", "scores")
    torch.testing.assert_close(scores, plain["reward"]["scores"], atol=1e-5, rtol=1e-5)
    assert scores.abs().max() > 0.05


IN_PLACE = [each for each in ALL if not cases.is_offloaded(cases.LAYOUTS[each.values[0]][each.values[1]])]


@pytest.mark.parametrize(("world", "layout"), IN_PLACE)
def test_modules_of_the_caller_give_the_same(results: Any, world: str, layout: str) -> None:
    for part in results(world, layout):
        expected = metrics_of(part["vanilla"])
        found = {name: value for name, value in part["bare actor"].items() if name in expected}
        assert len(found) > 5 and "actor/grad_norm" in found
        assert found == pytest.approx({name: expected[name] for name in found}, rel=1e-5, abs=1e-6)
        torch.testing.assert_close(part["critic"]["bare"], part["critic"]["after"])
        torch.testing.assert_close(part["bare reward"], part["reward"]["scores"])


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_each_switch_frees_its_part_between_the_turns_of_a_role(results: Any, world: str, layout: str) -> None:
    """Whoever only infers has nothing but parameters; that the numbers stay is shown above."""
    settings = cases.LAYOUTS[world][layout]
    offloaded = [part for part, switch in cases.PARTS.items() if settings.get(switch)]
    for part in results(world, layout):
        for name in ("vanilla", "critic"):
            assert part[name]["away"] == offloaded
        assert part["reward"]["away"] == [each for each in offloaded if each == "model"]


def metrics_of(part: dict[str, Any]) -> dict[str, float]:
    return {name: value for name, value in part["metrics"].items() if not name.startswith("perf/")}


def test_selections_of_tokens_count(results: Any) -> None:
    """What the layouts are compared with is not the plain loss under other names."""
    plain = results("two workers", "fsdp")[0]["fsdp"]
    norms = [plain[name]["metrics"]["actor/grad_norm"] for name in cases.ACTORS]
    assert len({round(norm, 4) for norm in norms}) == len(norms), norms


@pytest.mark.parametrize(("world", "layout"), ALL)
def test_places_are_those_of_megatron_core(results: Any, world: str, layout: str) -> None:
    for part in results(world, layout):
        assert part["info"] == part["place"]
        assert part["timeouts"] == [cases.TIMEOUT_S] * 3  # torch's own for later groups is half an hour
        assert part["vanilla"]["rows"] == part["place"]["dp_rank"]
    counted = [part["place"] for part in results(world, layout) if part["vanilla"]["counts"]]
    assert [place["dp_rank"] for place in counted] == list(range(counted[0]["dp_size"]))
