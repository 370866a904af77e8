"""The exact KL in the loss: against plain transformers, and the same on every layout."""

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import Ranks, note
from tests.workers.engine import cases, real_losses
from verl.protocol import DataProto
from verl.utils.fsdp_utils import full_tensor
from verl.workers.config import FSDPActorConfig, PolicyLossConfig
from verl.workers.engine import BaseEngine
from verl.workers.roles.losses import ppo_loss

LORA = {"model": {"lora_rank": 4, "lora_alpha": 8}}
CASES: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "whole": {"cut": {}},
        "micro 1, checkpointing": {"cut": cases.MICRO[1], "model": {"enable_gradient_checkpointing": True}},
        "unpacked": {"cut": cases.MICRO[3], "model": cases.PADDED},
        "lora": LORA | {"cut": cases.MICRO[4]},
    },
    2: {
        "two ranks, uneven": {"cut": cases.dynamic(20), "uneven": True},
        "two ranks, offload": {"cut": cases.MICRO[2], "engine": {"param_offload": True}},
        "ulysses": {"cut": cases.MICRO[3], "engine": {"ulysses_sequence_parallel_size": 2}},
        "lora, two ranks": LORA | {"cut": cases.dynamic(20), "uneven": True},
    },
}
ACTOR = FSDPActorConfig(
    ppo_micro_batch_size_per_gpu=1,
    policy_loss=PolicyLossConfig(loss_mode="gpg"),
    use_kl_loss=True,
    kl_loss_type="full",
    kl_loss_coef=1.0,
)


def batch(rows: list[int], cut: dict[str, Any]) -> DataProto:
    """A batch whose advantages are zero: the KL is all there is, and no log-probability of a reference is given."""
    data = cases.batch(rows, **cut, calculate_full_kl=True)
    data.batch["advantages"] = torch.zeros(len(rows), cases.RESPONSE)
    data.batch["old_log_probs"] = torch.zeros(len(rows), cases.RESPONSE)
    return data


def run_case(folder: Path, case: dict[str, Any]) -> dict[str, Any]:
    engine = cases.build(folder / "plain", case.get("model"), case.get("engine"))
    rows, cut = cases.rows_of(engine, case.get("uneven", False)), case["cut"]
    reference: BaseEngine | None = None
    if case.get("model", {}).get("lora_rank"):
        with engine.train_mode():  # adapters start as nothing: some steps make them something
            for _ in range(8):
                engine.train_batch(cases.batch(rows, **cut), cases.loss_fn)
    else:
        reference = cases.build(folder / "other", case.get("model"), {**case.get("engine", {}), "forward_only": True})
    engine.set_reference(reference)
    found: dict[str, Any] = {"rows": rows, "weights": cases.export(engine)}
    with engine.eval_mode():
        found["output"] = engine.infer_batch(batch(rows, cut))
        assert "full_kl" not in engine.infer_batch(cases.batch(rows, **cut))
    with engine.train_mode():
        found["metrics"] = engine.forward_backward_batch(batch(rows, cut), partial(ppo_loss, ACTOR))
        named = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
        found["gradients"] = {name: full_tensor(grad).clone() for name, grad in named.items()}
    return found


def run_world(rank: int, world_size: int, folder: Path, store: str) -> None:
    import torch.distributed as dist

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    results = {}
    for name, case in CASES[world_size].items():
        note(name)
        results[name] = run_case(folder, case)
    torch.save(results, folder / f"kl_{world_size}_{rank}.pt")
    if world_size > 1:
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("kl")
    cases.write_model(root / "plain")
    model = cases.write_model(root / "other")
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(root / "other")
    return root


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, list[dict[str, Any]]]:
    two = Ranks(run_world, (2, folder, str(folder / "store")), nprocs=2)
    run_world(0, 1, folder, "")
    two.join()
    worlds = {world: [torch.load(folder / f"kl_{world}_{rank}.pt") for rank in range(world)] for world in (1, 2)}
    return {name: [rank[name] for rank in worlds[world]] for world in (1, 2) for name in CASES[world]}


def divergence(model: Any, reference: Any) -> Tensor:
    """Return sum p (log p - log q) at every token, by plain transformers."""
    log_p, log_q = (
        torch.log_softmax(real_losses.plain_logits(each) / cases.TEMPERATURE, dim=-1) for each in (model, reference)
    )
    return (log_p.exp() * (log_p - log_q)).sum(-1) * cases.tensors()["response_mask"]


@pytest.mark.parametrize("name", [name for world in CASES.values() for name in world if "lora" not in name])
def test_equals_plain_transformers(results: Any, folder: Path, name: str) -> None:
    model = real_losses.load(folder / "plain")
    tokens = divergence(model, real_losses.load(folder / "other"))
    loss = tokens.sum() / cases.tensors()["response_mask"].sum()
    loss.backward()
    assert loss > 0.01
    for rank in results[name]:
        torch.testing.assert_close(rank["output"]["full_kl"], tokens.detach()[rank["rows"]], atol=1e-5, rtol=1e-4)
        assert rank["metrics"]["actor/kl_loss"] == pytest.approx(loss.item(), rel=1e-5)
        for parameter, value in model.named_parameters():
            torch.testing.assert_close(rank["gradients"][parameter], value.grad, atol=1e-5, rtol=1e-4, msg=parameter)


@pytest.mark.parametrize("name", ["lora", "lora, two ranks"])
def test_adapters_are_compared_with_their_base(results: Any, folder: Path, name: str) -> None:
    base = real_losses.load(folder / "plain")
    for rank in results[name]:
        merged = real_losses.load(folder / "plain")
        merged.load_state_dict(rank["weights"])
        tokens = divergence(merged, base).detach()
        assert tokens.max() > 1e-3
        torch.testing.assert_close(rank["output"]["full_kl"], tokens[rank["rows"]], atol=1e-5, rtol=1e-4)
        norms = [torch.nn.utils.get_total_norm(each["gradients"].values()) for each in (rank, results["lora"][0])]
        assert norms[0] == pytest.approx(norms[1].item(), rel=0.05) and norms[1] > 1e-3


def test_what_is_missing_is_named(folder: Path) -> None:
    engine = cases.build(folder / "plain")
    with pytest.raises(ValueError, match="set_reference"), engine.eval_mode():
        engine.infer_batch(batch([0], {}))
    with pytest.raises(RuntimeError, match="lora_rank"):
        engine.set_reference(None)
    terms = {"log_probs": torch.zeros(1, cases.RESPONSE)}
    with pytest.raises(ValueError, match="kl_loss_type='full' needs"):
        ppo_loss(ACTOR, terms, batch([0], {}))
