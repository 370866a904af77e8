"""A fused head on Megatron-Core, on every kind of layout: against transformers, and against the plain head.

Two ranks run in CI, four with ``--full``.
"""

import importlib
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import note, spawn_ranks
from tests.workers.engine import cases, megatron_cases, real_losses
from tests.workers.engine.megatron_cases import CP, EP, ETP1, PLAIN, PP, RECOMPUTE, TP, VPP
from tests.workers.engine.test_engine_contract import assert_output, assert_real_loss, assert_step

pytest.importorskip("megatron.core", reason="the extra mcore is not installed")

HEADS = {"plain": {"use_fused_kernels": False}, "fused": {"use_fused_kernels": True}}
RECOMPUTED = {"engine": {"override_transformer_config": RECOMPUTE}}
CASES: dict[int, dict[str, tuple[dict[str, Any], dict[str, Any]]]] = {
    2: {
        "tp 2, sequence parallel": (TP, {"cut": cases.dynamic(20), **RECOMPUTED}),
        "tp 2, tied": (TP | {"sequence_parallel": False}, {"cut": cases.MICRO[3], "folder": "tied"}),
        "pp 2, tied": (PP, {"cut": cases.MICRO[2], "folder": "tied"}),
        "cp 2": (CP, {"cut": cases.MICRO[1]}),
        "dp 2": ({}, {"cut": cases.dynamic(20), "uneven": True}),
    },
    4: {
        "tp 2 pp 2": (TP | PP, {"cut": cases.MICRO[2]}),
        "tp 2 pp 2 x 2 virtual, tied": (TP | VPP, {"cut": cases.MICRO[1], "folder": "tied"}),
        "tp 2 cp 2": (TP | CP, {"cut": cases.MICRO[1]}),
        "tp 2 dp 2, tied": (TP | PLAIN, {"cut": cases.dynamic(20), "uneven": True, "folder": "tied"}),
        "tp 2 ep 2": (TP | EP | ETP1, {"cut": cases.dynamic(20), "uneven": True, "folder": "qwen3_moe"}),
    },
}
EVERY = [
    pytest.param(world, name, marks=pytest.mark.full if world == 4 else [])
    for world, chosen in CASES.items()
    for name in chosen
]  # fmt: skip


def takes_steps(world: int, name: str) -> bool:
    """Whether a case has the model of the reference; the contract does the same."""
    return "expert_model_parallel_size" not in CASES[world][name][0]


def model_of(case: dict[str, Any]) -> str:
    return case.get("folder", "plain")


def run(rank: int, world_size: int, folder: Path) -> None:
    """Run every case with either head on one rank, and save what came out."""
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    store = f"file://{folder}/store_{world_size}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world_size)
    importlib.import_module("verl.workers.engine.megatron")  # which prepares Megatron-Core for the CPU
    from megatron.core import parallel_state

    results: dict[str, Any] = {}
    for name, (layout, case) in CASES[world_size].items():
        results[name] = {}
        for head, model in HEADS.items():
            note(f"{name}, {head} head")
            found = megatron_cases.run_case(folder, layout, case | {"model": model})
            if takes_steps(world_size, name):
                found["steps"] = megatron_cases.three_steps(folder, layout, model_of(case), model)
            results[name][head] = found
        parallel_state.destroy_model_parallel()
    if world_size == 2:
        note("a vocabulary that is cut")
        results["cut"] = cut_vocabulary(folder, rank)
    torch.save(results, folder / f"{world_size}_{rank}.pt")


def cut_vocabulary(folder: Path, rank: int) -> dict[str, Any]:
    """Return what heads make of half a vocabulary, whose last row on rank 1 pads it and means nothing."""
    found: dict[str, Any] = {}
    for dtype in ("fp32", "bf16"):
        for head, model in HEADS.items():
            engine: Any = megatron_cases.build(
                folder / "plain", TP | {"dtype": dtype}, model=cases.model_config(folder / "plain", **model)
            )
            weight = engine.models[0].output_layer.weight
            width = cases.VOCAB // 2 + 1
            assert weight.shape[0] == width
            if rank == 1:
                weight.data[-1] = 3.0
            with engine.eval_mode():
                rows = cases.batch(**cases.MICRO[4])
                outputs = engine.infer_batch(rows)
                rows.meta_info["calculate_entropy"] = False
                alone = engine.infer_batch(rows)
            with engine.train_mode():
                engine.optimizer_zero_grad()
                engine.forward_backward_batch(cases.batch(**cases.MICRO[4]), cases.loss_fn)
                gradients = megatron_cases.gradients(engine)
                padding = weight.main_grad[-1].clone() if rank == 1 else torch.zeros(1)
            found[f"{head}, {dtype}"] = {
                "output": outputs, "alone": alone, "gradients": gradients, "padding": padding
            }  # fmt: skip
    try:
        options = {"use_fused_kernels": True, "fused_kernel_options": {"impl_backend": "triton"}}
        megatron_cases.build(folder / "plain", TP, model=cases.model_config(folder / "plain", **options))
    except ValueError as error:
        found["triton"] = str(error)
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("fused")
    megatron_cases.write_models(root)
    return root


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    return launched(folder, 2)


@pytest.fixture(scope="module")
def four(folder: Path) -> list[dict[str, Any]]:
    return launched(folder, 4)


def launched(folder: Path, world: int) -> list[dict[str, Any]]:
    spawn_ranks(run, (world, folder), nprocs=world)
    return [torch.load(folder / f"{world}_{rank}.pt") for rank in range(world)]


def of_ranks(request: pytest.FixtureRequest, world: int, name: str, head: str) -> list[dict[str, Any]]:
    return [rank[name][head] for rank in request.getfixturevalue({2: "two", 4: "four"}[world])]


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_equals_plain_transformers(request: pytest.FixtureRequest, folder: Path, world: int, name: str) -> None:
    """Log-probabilities, entropies, the loss of the role, its gradient, and a step of AdamW."""
    parts, path = of_ranks(request, world, name, "fused"), folder / model_of(CASES[world][name][1])
    model = cases.load(path)
    real = real_losses.reference(model, "language_model")
    real["gradients"] = cases.under_checkpoint_names(model, real["gradients"])
    assert_real_loss(parts, real)
    model = cases.load(path)
    expected = cases.reference_step(model)
    expected["weights"] = cases.under_checkpoint_names(model, expected["weights"])
    assert_output(parts, expected["output"])
    assert_step(parts, expected)


@pytest.mark.parametrize(("world", "name"), [each for each in EVERY if takes_steps(*each.values)])
def test_three_steps_of_adamw(request: pytest.FixtureRequest, folder: Path, world: int, name: str) -> None:
    parts = of_ranks(request, world, name, "fused")
    expected = megatron_cases.reference_three_steps(folder, model_of(CASES[world][name][1]))
    for part in parts:
        for found, wanted in zip(part["steps"]["metrics"], expected["metrics"], strict=True):
            assert found == pytest.approx(wanted, rel=1e-4, abs=1e-5)
        assert part["steps"]["weights"].keys() == expected["weights"].keys()
        assert_equal(part["steps"]["weights"], expected["weights"], 2e-6, 1e-5)


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], atol: float, rtol: float) -> None:
    for key, tensor in found.items():
        torch.testing.assert_close(tensor, expected[key], atol=atol, rtol=rtol, msg=lambda text, key=key: key + text)


@pytest.mark.parametrize(("world", "name"), EVERY)
def test_equals_the_plain_head(request: pytest.FixtureRequest, world: int, name: str) -> None:
    heads = (of_ranks(request, world, name, head) for head in HEADS)
    for plain, fused in zip(*heads, strict=True):
        assert_equal(fused["output"], plain["output"], 5e-6, 1e-6)
        for loss in ("metrics", "norm"):
            assert fused["real loss"][loss] == pytest.approx(plain["real loss"][loss], rel=1e-6, abs=1e-6)
        assert_equal(fused["real loss"]["gradients"], plain["real loss"]["gradients"], 1e-6, 1e-5)
        if takes_steps(world, name):
            assert_equal(fused["steps"]["weights"], plain["steps"]["weights"], 1e-6, 1e-5)


def test_rows_that_pad_the_vocabulary_are_no_tokens(two: list[dict[str, Any]], folder: Path) -> None:
    """They have large weights here, no probability and no gradient."""
    expected = cases.reference_loss(cases.load(folder / "plain"))[1]
    for rank in two:
        found = rank["cut"]["fused, fp32"]
        assert_equal(found["output"], expected, 1e-5, 1e-5)
        assert found["alone"].keys() == {"log_probs"}
        assert torch.equal(found["alone"]["log_probs"], found["output"]["log_probs"])
        assert (found["padding"] == 0).all()


def test_half_precision_rounds_as_the_plain_head(two: list[dict[str, Any]]) -> None:
    for rank in two:
        plain, fused, exact = (rank["cut"][name] for name in ("plain, bf16", "fused, bf16", "fused, fp32"))
        for part in ("output", "gradients"):
            for name, value in exact[part].items():
                size = value.norm()
                error = {head: (found[part][name].float() - value).norm() / size for head, found in
                         (("plain", plain), ("fused", fused))}  # fmt: skip
                assert error["fused"] < 1.2 * error["plain"] + 1e-3, (name, error)


def test_triton_is_refused_where_it_cannot_run(two: list[dict[str, Any]]) -> None:
    assert all("impl_backend=triton needs a CUDA device" in rank["cut"]["triton"] for rank in two)
