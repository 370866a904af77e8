"""The balancing loss of experts is that of transformers, over each micro-batch, in every layout.

Tolerance: 1e-5, as in the engine contract, relative to the largest element of a gradient; sums of fp32 run in another
order. The largest difference found is 1.2e-6.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.ranks import Ranks
from tests.workers.engine import balancing_cases, cases
from tests.workers.engine.balancing_cases import COEFFICIENT, FAMILIES, RANKS
from verl.base_config import ConfigError, WrongInput
from verl.workers.engine import BaseEngine, passes
from verl.workers.engine.fsdp.adapters import merged_weights


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("balancing")
    balancing_cases.write_model(folder / "model", "Qwen3Moe")
    return folder


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    Ranks(balancing_cases.run_rank, (folder,), nprocs=2).join()
    return [torch.load(folder / f"rank_{rank}.pt") for rank in range(2)]


@pytest.fixture(scope="module")
def engine(folder: Path) -> Callable[..., BaseEngine]:
    built: dict[str, BaseEngine] = {}

    def get(**model: Any) -> BaseEngine:
        return built.setdefault(repr(model), cases.build(folder / "model", model))

    return get


@pytest.fixture(scope="module")
def plain(folder: Path) -> Any:
    return cases.load(folder / "model").eval()


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert {name: found["metrics"].get(name) for name in expected["metrics"]} == pytest.approx(
        expected["metrics"], rel=1e-5
    )
    assert found["gradient"].keys() == expected["gradient"].keys()
    for name, gradient in expected["gradient"].items():
        scale = max(float(gradient.abs().max()), 1e-3)
        assert float((found["gradient"][name] - gradient).abs().max()) <= 1e-5 * scale, name


WAYS: dict[str, dict[str, Any]] = {
    "packed": {},
    "padded": cases.PADDED,
    "fused, packed": cases.FUSED,
    "fused, padded": cases.FUSED | cases.PADDED,
    "checkpointing, offloaded activations": {"enable_gradient_checkpointing": True, "enable_activation_offload": True},
}


@pytest.mark.parametrize("cut", [cases.MICRO[3], {"micro_batch_size_per_gpu": 8}, cases.dynamic(40)], ids=str)
@pytest.mark.parametrize("way", WAYS)
def test_gradient_is_that_of_transformers(
    folder: Path, engine: Callable[..., BaseEngine], way: str, cut: dict[str, Any]
) -> None:
    data = cases.batch(**cut)
    parts = [each.index for each in passes.split_batch(data, passes.PassSpec.from_meta(data.meta_info))]
    found = balancing_cases.gradient_of(engine(**WAYS[way]), data)
    assert_same(found, balancing_cases.reference(folder / "model", parts))


@pytest.mark.parametrize("layout", RANKS)
def test_two_ranks(folder: Path, ranks: list[dict[str, Any]], layout: str) -> None:
    expected = balancing_cases.reference(folder / "model", RANKS[layout]["parts"])
    for results in ranks:
        assert_same(results[layout], expected)


@settings(max_examples=8, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(st.integers(0, cases.ROWS - 1), min_size=1, max_size=6), size=st.integers(1, 6))
def test_any_rows(engine: Callable[..., BaseEngine], plain: Any, rows: list[int], size: int) -> None:
    """The metric is the mean over micro-batches, packed and padded, whatever the rows are."""
    data = cases.batch(rows, micro_batch_size_per_gpu=size)
    with torch.no_grad():
        losses = [balancing_cases.aux_loss(plain, part) for part in data.split(size)]
    for way in (WAYS["packed"], WAYS["padded"], WAYS["fused, padded"]):
        metrics = engine(**way).forward_backward_batch(data, cases.loss_fn)
        assert metrics["aux_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)


@pytest.mark.parametrize("off", [{"router_aux_loss_coef": 0.0}, {"output_router_logits": False}], ids=str)
def test_zero_and_absent_change_no_bit(tmp_path: Path, off: dict[str, Any]) -> None:
    balancing_cases.write_model(tmp_path, "Qwen3Moe", output_router_logits=False)
    plain, other = (
        cases.build(tmp_path, {"override_config": each}) for each in ({}, {"output_router_logits": True} | off)
    )
    data = cases.batch(**cases.MICRO[3])
    expected, found = (balancing_cases.gradient_of(each, data) for each in (plain, other))
    assert found["metrics"] == expected["metrics"] and "aux_loss" not in found["metrics"]
    assert all(torch.equal(found["gradient"][name], each) for name, each in expected["gradient"].items())


def test_only_training_has_it(engine: Callable[..., BaseEngine], folder: Path) -> None:
    """Neither inference, nor a pass without gradient, nor a critic, as in transformers; losses do not see it."""
    data = cases.batch(**cases.MICRO[3])
    policy = engine()
    with policy.eval_mode():
        assert set(policy.infer_batch(data)) == {"log_probs", "entropy"}
    assert "aux_loss" not in policy.forward_backward_batch(data, cases.loss_fn, forward_only=True)
    seen: list[set[str]] = []
    policy.forward_backward_batch(data, lambda output, rows: seen.append(set(output)) or cases.loss_fn(output, rows))
    assert seen == [{"log_probs", "entropy"}] * 3
    critic = cases.build(folder / "model", kind="value_model")
    assert critic.aux_loss_coef == 0.0 and "aux_loss" not in critic.forward_backward_batch(data, cases.loss_fn)
    assert policy.aux_loss_coef == COEFFICIENT


@pytest.mark.parametrize("family", ["Qwen3Moe", "Jamba"])  # transformers records the linear layers of the second
def test_adapters_leave_it_the_loss_of_the_merged_model(tmp_path: Path, family: str) -> None:
    balancing_cases.write_model(tmp_path, family)
    adapters = {"lora_rank": 4, "lora_alpha": 8, "target_modules": "all-linear"}
    engine = cases.build(tmp_path, cases.PADDED | adapters)
    draw = torch.Generator().manual_seed(5)
    for name, parameter in engine.module.named_parameters():
        if "lora_" in name:
            parameter.data.copy_(torch.randn(parameter.shape, generator=draw) * 0.1)
    merged = cases.load(tmp_path).eval()
    merged.load_state_dict(dict(merged_weights(engine.module)), strict=False)
    with torch.no_grad():
        losses = [balancing_cases.aux_loss(merged, part) for part in cases.batch().split(4)]
    metrics = engine.forward_backward_batch(cases.batch(**cases.MICRO[4]), cases.loss_fn)
    assert metrics["aux_loss"] == pytest.approx(float(torch.stack(losses).mean()), rel=1e-5)
    if family == "Jamba":
        with pytest.raises(WrongInput, match=r"names model\.layers\.1\.\S*router, which cannot be adapted"):
            cases.build(tmp_path, cases.PADDED | adapters | {"target_modules": ["q_proj", "router"]})


def test_routers_that_give_nothing_are_refused(folder: Path) -> None:
    """A class that sharding has renamed records no logits, of which transformers makes a loss of 0."""
    engine = cases.build(folder / "model")
    inner = engine.module.model
    inner.__class__ = type("Renamed", (type(inner),), {})
    with pytest.raises(WrongInput, match="returned no logits of its routers.*output_router_logits=false"):
        engine.forward_backward_batch(cases.batch(**cases.MICRO[3]), cases.loss_fn)


def test_terms_that_no_engine_computes_are_refused(tmp_path: Path) -> None:
    bamba = {"mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 32, "attn_layer_indices": [1]}
    cases.write_family(tmp_path, "Bamba", bamba | {"num_key_value_heads": 2, "z_loss_coefficient": 0.1})
    with pytest.raises(ConfigError, match="z_loss_coefficient=0.1: asks for a loss over the logits of all tokens"):
        cases.build(tmp_path, cases.PADDED)
    cases.build(tmp_path, cases.PADDED, {"forward_only": True})
    cases.build(tmp_path, cases.PADDED | {"override_config": {"z_loss_coefficient": 0.0}})


@pytest.mark.full
@pytest.mark.parametrize("way", ["packed", "padded", "fused, packed", "fused, padded"])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str, way: str) -> None:
    if family in balancing_cases.PADDED_ONLY and "packed" in way:
        pytest.skip("rows of this family cannot be packed")
    balancing_cases.write_model(tmp_path, family)
    eager = balancing_cases.EAGER if family == "GptOss" else {}
    engine = cases.build(tmp_path, WAYS[way] | eager)
    found = balancing_cases.gradient_of(engine, cases.batch(**cases.MICRO[4]))
    if family in balancing_cases.WITHOUT_LOSS:
        assert "aux_loss" not in found["metrics"]
        return
    parts = [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert_same(found, balancing_cases.reference(tmp_path, parts, **eager.get("override_config", {})))
