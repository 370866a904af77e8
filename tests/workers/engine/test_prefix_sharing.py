"""Sharing the tokens that rows begin with changes no output and no gradient.

Tolerances: sums of fp32 in another order, 1e-5 for log-probabilities and entropies (the largest difference found is
2e-6), and relative to the largest element for other tensors. Weights after a step of Adam are compared as the engine
contract compares them: where a gradient is near zero, its sign decides.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from torch import Tensor

from tests.ranks import Ranks
from tests.workers.engine import cases, loss_cases, megatron_cases, sharing_cases
from tests.workers.engine import vision_cases as vision
from tests.workers.engine.test_engine_contract import assert_weights
from verl.base_config import ConfigError
from verl.models.transformers import packing
from verl.models.transformers.prefix_sharing import mcore_sharing_problems
from verl.workers.engine import passes

FUSED, LORA, CHECKPOINTED = sharing_cases.FUSED, sharing_cases.LORA, sharing_cases.CHECKPOINTED


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharing")
    cases.write_model(root / "qwen2")
    cases.write_model(root / "other", num_attention_heads=2)
    cases.write_family(root / "llama", "Llama", {})
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "head_dim": 16}
    cases.write_family(root / "qwen3_moe", "Qwen3Moe", experts)
    return root


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-5) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        scale = 1.0 if name in ("log_probs", "entropy") else max(float(expected[name].abs().max()), 1e-3)
        assert float((tensor - expected[name]).abs().max()) <= tolerance * scale, name


BATCHES = {
    "groups": sharing_cases.groups(),
    **{f"branches {seed}": sharing_cases.branches(seed) for seed in range(4)},
}


ENGINES: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen2", "language_model", {}),
    ("qwen2", "language_model", FUSED | CHECKPOINTED),
    ("qwen2", "language_model", LORA),
    ("qwen2", "value_model", {}),
    ("llama", "language_model", CHECKPOINTED),
    ("qwen3_moe", "language_model", {}),
]
"""Families, kinds and settings; each runs with groups of samples and with one of the trees."""


@pytest.mark.parametrize(
    "family, kind, model, batch",
    [(*engine, batch) for at, engine in enumerate(ENGINES) for batch in ("groups", f"branches {at % 4}")],
)
def test_nothing_changes(folder: Path, family: str, kind: str, model: dict[str, Any], batch: str) -> None:
    data = BATCHES[batch]
    data.meta_info.update(micro_batch_size_per_gpu=5)
    assert sharing_cases.distinct_tokens(data) < int(data.batch["attention_mask"].sum())
    plain, shared = (sharing_cases.build(folder / family, shares, kind, **model) for shares in (False, True))
    shared.module.load_state_dict(plain.module.state_dict())  # the random heads of critics and adapters
    assert_close(sharing_cases.outputs(shared, data), sharing_cases.outputs(plain, data))
    (metrics, found), (expected, gradient) = (sharing_cases.gradients(engine, data) for engine in (shared, plain))
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert_close(found, gradient)
    assert_close(sharing_cases.descend(shared, data), sharing_cases.descend(plain, data))
    assert_weights(sharing_cases.adam(shared, data), sharing_cases.adam(plain, data))


def test_tokens_are_computed_once(folder: Path) -> None:
    """The model sees the distinct tokens of each micro-batch, whose rows begin alike."""
    engine, data = sharing_cases.build(folder / "qwen2", True), sharing_cases.groups()
    data.meta_info.update(micro_batch_size_per_gpu=4)
    seen = []
    engine.module.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    sharing_cases.outputs(engine, data)
    groups = [data.select_idxs(rows) for rows in ([0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11])]
    assert sorted(seen) == sorted(map(sharing_cases.distinct_tokens, groups))
    segments = engine.take_segments()
    assert sum(seen) == sum(until - above for until, above in segments) and engine.take_segments() == []


@pytest.mark.parametrize("loss, mode", [*loss_cases.COMBINATIONS, *loss_cases.VALUES])
def test_every_loss(engines: Any, loss: str, mode: str) -> None:
    kind = "value_model" if loss == loss_cases.VALUE else "language_model"
    data = sharing_cases.with_old_numbers(sharing_cases.groups())
    data.meta_info.update(micro_batch_size_per_gpu=5)
    found, expected = (loss_cases.gradient(engine, data, loss, mode) for engine in engines[kind])
    assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
    assert found["names"] == expected["names"]
    scale = float(expected["gradient"].abs().max())
    assert float((found["gradient"] - expected["gradient"]).abs().max()) <= 1e-5 * scale


@settings(max_examples=15, derandomize=True, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=sharing_cases.trees())
def test_random_trees(engines: Any, data: Any) -> None:
    data.meta_info.update(micro_batch_size_per_gpu=7)
    for shared, plain in engines.values():
        assert_close(sharing_cases.outputs(shared, data), sharing_cases.outputs(plain, data))
        (metrics, found), (expected, gradient) = (sharing_cases.gradients(engine, data) for engine in (shared, plain))
        assert metrics == pytest.approx(expected, rel=1e-5)
        assert_close(found, gradient)


@pytest.mark.parametrize("rows", sharing_cases.oddities())
def test_odd_rows(engines: Any, rows: str) -> None:
    data = sharing_cases.oddities()[rows]
    data.meta_info.update(cases.MICRO[3])
    for shared, plain in engines.values():
        assert_close(sharing_cases.outputs(shared, data), sharing_cases.outputs(plain, data))
        (metrics, found), (expected, gradient) = (sharing_cases.gradients(engine, data) for engine in (shared, plain))
        assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-7)
        assert_close(found, gradient)


@pytest.mark.full
def test_every_loss_in_every_layout(folder: Path) -> None:
    """Losses x aggregations x layouts: 480 combinations."""
    two = Ranks(sharing_cases.run_product, (2, folder), nprocs=2)
    sharing_cases.run_product(0, 1, folder)
    two.join()
    checked = set()
    for world, layouts in sharing_cases.PRODUCT.items():
        for rank in range(world):
            results = torch.load(folder / f"product_{world}_{rank}.pt")
            for layout in layouts:
                for each, found in results[layout].items():
                    assert found["norm"] > 1e-3, (layout, each)
                    assert found["apart"] < 1e-5, (layout, each)
                    assert found["metrics"][0] == pytest.approx(found["metrics"][1], rel=1e-5, abs=1e-6), (layout, each)
                    checked.add((layout, each))
    assert len(checked) == 16 * len(loss_cases.COMBINATIONS + loss_cases.VALUES)


@pytest.fixture(scope="module")
def engines(folder: Path) -> dict[str, Any]:
    """An engine that shares and one that does not, with the same weights, by kind."""
    made = {}
    for kind in ("language_model", "value_model"):
        plain, shared = (sharing_cases.build(folder / "qwen2", shares, kind) for shares in (False, True))
        shared.module.load_state_dict(plain.module.state_dict())
        made[kind] = (shared, plain)
    return made


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "glm4v"])
def test_samples_of_a_prompt_share_its_images(tmp_path: Path, family: str) -> None:
    """Rows 2 and 4 differ after their prompt, row 0 holds an image of a tool; tower and model see the images once."""
    vision.write_with_positions(tmp_path, family)
    data = vision.samples_of_prompts(tmp_path, family)
    shown = [row or {} for row in data.non_tensor_batch["multi_modal_inputs"]]
    patches = [len(row[name]) for row in shown for name in ("pixel_values", "pixel_values_videos") if name in row]
    engines = [sharing_cases.build(tmp_path, shares) for shares in (True, False)]
    seen: list[int] = []
    for engine in engines:
        engine.base_model.model.visual.register_forward_pre_hook(lambda _, args: seen.append(len(args[0])))
    assert_close(*(sharing_cases.outputs(engine, data) for engine in engines))
    assert len(seen) == 2 and len(set(seen)) == 1
    for engine in engines:
        assert sum(engine.take_images()) == seen[0] < sum(patches)
        assert engine.take_images() == []
    assert sharing_cases.distinct_tokens(data) < int(data.batch["attention_mask"].sum())
    (metrics, found), (expected, gradient) = (sharing_cases.gradients(engine, data) for engine in engines)
    assert metrics == pytest.approx(expected, rel=1e-5)
    assert_close(found, gradient)
    assert_close(*(sharing_cases.descend(engine, data) for engine in engines))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_other_images_behind_equal_tokens(tmp_path: Path, family: str) -> None:
    """Three rows have equal ids and positions. Two of them show the same image and share, the third another one."""
    vision.write_with_positions(tmp_path, family)
    data = vision.batch(tmp_path, family, [5, 5, 5])
    shown = data.non_tensor_batch["multi_modal_inputs"]
    shown[1] = shown[1] | {"pixel_values": -shown[1]["pixel_values"]}
    found, expected = (sharing_cases.outputs(sharing_cases.build(tmp_path, shares), data) for shares in (True, False))
    assert_close(found, expected)
    log_probs = found["log_probs"]
    assert float((log_probs[0] - log_probs[1]).abs().max()) > 1e-3 and log_probs[0].equal(log_probs[2])
    tokens = int(data.batch["attention_mask"][0].sum())
    assert sharing_cases.distinct_tokens(data) == 2 * tokens


def test_a_reward_model_and_the_full_kl(folder: Path) -> None:
    """A token is read at itself, and its whole distribution is compared with that of a reference."""
    data = sharing_cases.groups()
    scores, expected = (sharing_cases.build(folder / "llama", shares, "value_model") for shares in (True, False))
    scores.module.load_state_dict(expected.module.state_dict())
    for engine in (scores, expected):
        engine.forward.lead = engine.lead = 0
    assert_close(sharing_cases.outputs(scores, data), sharing_cases.outputs(expected, data))
    kl = []
    for shares in (True, False):
        engine, reference = (sharing_cases.build(folder / name, shares) for name in ("qwen2", "other"))
        for parameter in reference.module.parameters():  # a divergence above the rounding of log-probabilities
            parameter.data.mul_(3)
        engine.set_reference(reference)
        with engine.eval_mode():
            kl.append(engine.infer_batch(data, passes.PassSpec(full_kl=True)))
    assert_close(*kl)
    assert kl[0]["full_kl"].max() > 0.01
    with pytest.raises(ValueError, match="the reference has use_prefix_sharing=False and the policy True"):
        sharing_cases.build(folder / "qwen2", True).set_reference(reference)


def test_the_pass_of_a_reference_does_not_count(folder: Path) -> None:
    """The base model of a policy with adapters, by the same engine."""
    engine, data = sharing_cases.build(folder / "qwen2", True, **LORA), sharing_cases.groups()
    engine.set_reference(None)
    with engine.eval_mode():
        engine.infer_batch(data, passes.PassSpec(full_kl=True))
    computed = sum(until - above for until, above in engine.take_segments())
    assert computed == sharing_cases.distinct_tokens(data)


def test_two_ranks(folder: Path) -> None:
    """Sharded, and with the ranks of a sequence; each rank shares among its own rows."""
    Ranks(sharing_cases.run_world, (2, folder / "qwen2", str(folder / "store")), nprocs=2).join()
    for rank in range(2):
        results = torch.load(folder / f"sharing_rank_{rank}.pt")
        for name in sharing_cases.LAYOUTS:
            plain, shared = results[name, False], results[name, True]
            assert shared["metrics"] == pytest.approx(plain["metrics"], rel=1e-5), name
            for part in ("output", "gradient", "weights"):
                assert_close(shared[part], plain[part])


def test_on_megatron_core(tmp_path: Path) -> None:
    """Positions follow the path of a token, not its place in the packed row."""
    pytest.importorskip("megatron.core")
    megatron_cases.write_models(tmp_path)
    Ranks(sharing_cases.run_mcore, (2, tmp_path), nprocs=2).join()
    for rank in range(2):
        results = torch.load(tmp_path / f"sharing_{rank}.pt")
        for name in sharing_cases.MCORE:
            plain, shared = results[name, False], results[name, True]
            assert shared["computed"] == shared["distinct"] < shared["tokens"] and plain["computed"] == 0, name
            assert shared["metrics"] == pytest.approx(plain["metrics"], rel=1e-5), name
            for part in ("output", "gradient", "weights"):
                assert_close(shared[part], plain[part])
            assert_same(shared["odd"], plain["odd"])
        assert {"equal, odd", "padding", "tree 1"} < set(results["tp 2", True]["odd"])


def assert_same(found: dict[Any, dict[str, Any]], expected: dict[Any, dict[str, Any]]) -> None:
    """Compare what rows gave, by their name."""
    assert found.keys() == expected.keys()
    for name, of_rows in found.items():
        assert of_rows["metrics"] == pytest.approx(expected[name]["metrics"], rel=1e-5, abs=1e-7), name
        for part in ("output", "gradient"):
            assert_close(of_rows[part], expected[name][part])


@pytest.mark.full
def test_odd_rows_and_random_trees_on_megatron_core(tmp_path: Path) -> None:
    pytest.importorskip("megatron.core")
    megatron_cases.write_models(tmp_path)
    Ranks(sharing_cases.run_mcore_odd, (2, tmp_path), nprocs=2).join(900)
    for rank in range(2):
        results = torch.load(tmp_path / f"odd_{rank}.pt")
        for name in sharing_cases.MORE_MCORE:
            assert len(results[name, True]) == len(sharing_cases.oddities()) + sharing_cases.TREES
            assert_same(results[name, True], results[name, False])


@pytest.mark.parametrize(
    "config, cp_size, use_mbridge, message",
    [
        ({"model_type": "qwen2"}, 2, False, "megatron.context_parallel_size=2"),
        ({"model_type": "deepseek_v3", "kv_lora_rank": 24}, 1, False, "latent attention"),
        ({"model_type": "qwen2"}, 1, True, "megatron.use_mbridge=true"),
    ],
)
def test_refused_on_megatron_core(config: dict[str, Any], cp_size: int, use_mbridge: bool, message: str) -> None:
    (problem,) = mcore_sharing_problems(config, cp_size, use_mbridge)
    assert message in problem
    assert not list(mcore_sharing_problems({"model_type": "qwen2"}, 1, False))


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("attention_dropout", 0.1, "attention_dropout to be left out, it is 0.1"),
        ("hidden_dropout", 0.1, "hidden_dropout to be left out"),
        ("moe_input_jitter_eps", 0.01, "moe_input_jitter_eps to be left out"),
        ("moe_expert_capacity_factor", 1.5, "moe_expert_capacity_factor=1.5: experts would drop other tokens"),
        ("moe_expert_capacity_factor", 0.0, "moe_expert_capacity_factor=0.0"),
        ("apply_rope_fusion", True, "apply_rope_fusion=true, whose kernel counts positions"),
    ],
)
def test_options_of_megatron_core_that_depend_on_rows(name: str, value: Any, message: str) -> None:
    (problem,) = mcore_sharing_problems({"model_type": "qwen3_moe"}, 1, False, overrides={name: value})
    assert message in problem
    harmless = {"attention_dropout": 0.0, "moe_expert_capacity_factor": -1, "recompute_granularity": "full"}
    assert not list(mcore_sharing_problems({}, 1, False, overrides=harmless))
    assert not list(mcore_sharing_problems({}, 1, False, overrides={"hidden_dropout": 0.1}, trains=False))


@pytest.mark.parametrize("budget", [48, 70, 120, 1000])
def test_micro_batches_hold_so_many_distinct_tokens(budget: int) -> None:
    data = sharing_cases.groups()
    spec = passes.PassSpec(use_dynamic_bsz=True, max_token_len=budget)
    made = passes.split_batch(data, spec, shares_prefixes=True)
    assert sorted(row for each in made for row in each.index) == list(range(len(data)))
    sizes = [sharing_cases.distinct_tokens(each.rows) for each in made]
    assert max(sizes) <= budget
    assert len(made) <= len(passes.split_batch(data, spec))


def test_the_longest_row_must_fit() -> None:
    spec = passes.PassSpec(use_dynamic_bsz=True, max_token_len=sharing_cases.PROMPT)
    with pytest.raises(ValueError, match="below the longest padded row, 48 tokens"):
        passes.split_batch(sharing_cases.groups(), spec, shares_prefixes=True)


@pytest.mark.parametrize(
    "model, message",
    [
        ({"override_config": {"attn_implementation": "sdpa"}}, "needs verl_varlen"),
        ({"override_config": {"attention_dropout": 0.1}}, "needs attention_dropout=0.0, it is 0.1"),
        (
            {
                "override_config": {
                    "layer_types": ["full_attention", "sliding_attention"],
                    "sliding_window": 4,
                    "use_sliding_window": True,
                }
            },
            "layers of type sliding_attention",
        ),
    ],
)
def test_refused(folder: Path, model: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        sharing_cases.build(folder / "qwen2", True, **model)


def test_attention_that_asks_for_no_boundaries(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A family that no table knows: its rows would attend to each other."""
    cases.write_family(folder / "stablelm", "StableLm", {})
    with pytest.raises(ConfigError, match="rows attend to each other, the attention of model_type='stablelm'"):
        sharing_cases.build(folder / "stablelm", False)
    monkeypatch.setattr(packing, "_IGNORANT", ())
    engine = sharing_cases.build(folder / "stablelm", False)
    with pytest.raises(ConfigError, match="use_remove_padding=true: would .*, the attention of model_type='stablelm'"):
        sharing_cases.outputs(engine, sharing_cases.groups())


def test_padded_rows_share_nothing(folder: Path) -> None:
    engine = sharing_cases.build(folder / "qwen2", True, use_remove_padding=False)
    plain = sharing_cases.build(folder / "qwen2", False, use_remove_padding=False)
    assert not engine.shares_prefixes
    data = sharing_cases.groups()
    data.meta_info.update(cases.MICRO[4])
    found, expected = (sharing_cases.outputs(each, data) for each in (engine, plain))
    assert all(torch.equal(found[name], expected[name]) for name in expected)
