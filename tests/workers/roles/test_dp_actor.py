"""Actor and critic around modules that the caller has built: equal to the engine and to plain transformers."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import Qwen2ForCausalLM, Qwen2ForTokenClassification

from tests.ranks import spawn_ranks
from tests.workers.engine import cases, real_losses
from verl.algos.aggregate import SHARE_COLUMN
from verl.protocol import DataProto
from verl.utils.fsdp_utils import full_tensor
from verl.workers.actor import BasePPOActor, DataParallelPPOActor
from verl.workers.config import FSDPActorConfig, FSDPCriticConfig, FSDPCriticModelCfg, FSDPEngineConfig
from verl.workers.critic import BasePPOCritic, DataParallelPPOCritic

EVERY_ROW = list(range(cases.ROWS))
LOSS = {
    "entropy_coeff": real_losses.ENTROPY,
    "use_kl_loss": True,
    "kl_loss_coef": real_losses.KL,
    "clip_ratio_c": real_losses.DUAL,
    "ppo_mini_batch_size": cases.ROWS,
}
CUTS = {
    "packed, by rows": {"ppo_micro_batch_size_per_gpu": 3, "use_remove_padding": True},
    "packed, by tokens": {"use_dynamic_bsz": True, "ppo_max_token_len_per_gpu": 20, "use_remove_padding": True},
    "padded": {"ppo_micro_batch_size_per_gpu": 3},
    "fused head": {"ppo_micro_batch_size_per_gpu": 3, "use_fused_kernels": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("dp")
    cases.write_model(root)
    return root


def adamw(module: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(module.parameters(), lr=cases.LR, weight_decay=0.01, fused=True)


def actor(module: nn.Module, optimizer: Any = None, **config: Any) -> DataParallelPPOActor:
    return DataParallelPPOActor(FSDPActorConfig(**(LOSS | CUTS["packed, by rows"] | config)), module, optimizer)


def asked(rows: list[int] | None = None) -> Any:
    """The batch as a caller of the bare classes hands it over."""
    data = real_losses.batch(rows or EVERY_ROW, micro_batch_size=2, max_token_len=20)
    del data.meta_info["calculate_entropy"]
    return data


def plain(folder: Path) -> Qwen2ForCausalLM:
    return Qwen2ForCausalLM.from_pretrained(folder)


def value_model(folder: Path) -> Qwen2ForTokenClassification:
    torch.manual_seed(2)
    return Qwen2ForTokenClassification.from_pretrained(
        folder, config=cases.tiny_config(num_labels=1, classifier_dropout=0.0)
    )


def torch_step(module: nn.Module) -> dict[str, torch.Tensor]:
    """Take torch's own step with the gradient that the definitions of the losses gave."""
    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    adamw(module).step()
    return {name: p.detach().clone() for name, p in module.named_parameters()}


def assert_same_step(before: dict, got: dict, expected: dict) -> None:
    """AdamW's first step is about lr x sign(gradient): where a gradient is about zero it is any number up to lr."""
    close = [((got[name] - tensor).abs() < 1e-3 * cases.LR).flatten() for name, tensor in expected.items()]
    assert torch.cat(close).float().mean() > 0.995
    assert not any(torch.equal(before[name], got[name]) for name in expected)


@pytest.mark.parametrize("cut", CUTS)
def test_actor_equals_plain_transformers(folder: Path, cut: str) -> None:
    reference = plain(folder)
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    expected = real_losses.reference(reference, "language_model")
    weights = torch_step(reference)
    output = cases.reference_step(plain(folder))["output"]

    module = plain(folder)
    built = actor(module, adamw(module), **({"use_remove_padding": False} | CUTS[cut]))
    assert isinstance(built, BasePPOActor)
    data = asked()
    data.meta_info["use_dynamic_bsz"] = cut == "packed, by tokens"
    log_probs, none = built.compute_log_prob(data)
    assert none is None
    again, entropy = built.compute_log_prob(data, calculate_entropy=True)
    assert torch.equal(log_probs, again)
    torch.testing.assert_close(log_probs, output["log_probs"], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, output["entropy"], atol=1e-5, rtol=1e-5)

    metrics = built.update_policy(asked())
    assert all(len(values) == 1 for values in metrics.values())
    assert metrics["actor/grad_norm"] == [pytest.approx(expected["norm"], rel=1e-5)]
    for name, value in expected["metrics"].items():
        assert metrics[name] == [pytest.approx(value, rel=1e-5, abs=1e-6)], name
    assert_same_step(before, dict(module.named_parameters()), weights)


def test_actor_equals_the_engine_bit_for_bit(folder: Path) -> None:
    """Two passes over two mini-batches; its weights go out under checkpoint names, as the engine's do."""
    engine = cases.build(folder)
    loss_fn = real_losses.LOSSES["language_model"]
    rows = real_losses.batch(EVERY_ROW, micro_batch_size_per_gpu=3)
    with engine.train_mode():
        steps = [engine.train_batch(rows.slice(start, start + 4), loss_fn) for start in (0, 4, 0, 4)]
    module = plain(folder)
    built = actor(module, adamw(module), ppo_mini_batch_size=4, ppo_epochs=2)
    metrics = built.update_policy(asked())
    assert metrics["actor/pg_loss"] == [step["actor/pg_loss"] for step in steps]
    assert metrics["actor/grad_norm"] == [step["grad_norm"] for step in steps]
    exported = cases.export(built.engine)
    for name, tensor in cases.export(engine).items():
        assert torch.equal(exported.pop(name), tensor), name
    assert not exported and built.engine.weights_version == 4


@pytest.mark.parametrize("remove_padding", [True, False])
def test_critic_equals_plain_transformers(folder: Path, remove_padding: bool) -> None:
    reference = value_model(folder)
    before = {name: p.detach().clone() for name, p in reference.named_parameters()}
    expected = real_losses.reference(reference, "value_model")
    with torch.no_grad():
        values = real_losses.plain_logits(reference)[..., 0] * cases.tensors()["response_mask"]
    weights = torch_step(reference)
    module = value_model(folder)
    config = FSDPCriticConfig(
        ppo_micro_batch_size_per_gpu=3,
        ppo_mini_batch_size=cases.ROWS,
        cliprange_value=real_losses.CLIP_VALUE,
        model=FSDPCriticModelCfg(use_remove_padding=remove_padding),
    )
    built = DataParallelPPOCritic(config, module, adamw(module))
    assert isinstance(built, BasePPOCritic)
    torch.testing.assert_close(built.compute_values(asked()), values, atol=1e-5, rtol=1e-5)
    metrics = built.update_critic(asked())
    assert metrics["critic/grad_norm"] == [pytest.approx(expected["norm"], rel=1e-5)]
    for name, value in expected["metrics"].items():
        assert metrics[name] == [pytest.approx(value, rel=1e-5, abs=1e-6)], name
    assert_same_step(before, dict(module.named_parameters()), weights)


def test_what_is_refused(folder: Path) -> None:
    module = plain(folder)
    with pytest.raises(ValueError, match="use_remove_padding=True needs a transformers model, not Linear"):
        actor(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="ulysses_sequence_parallel_size=2 must divide the 1 ranks"):
        actor(module, ulysses_sequence_parallel_size=2)
    built, data = actor(module), asked()
    with pytest.raises(RuntimeError, match="has no optimizer"):
        built.update_policy(data)
    del data.meta_info["micro_batch_size"]
    with pytest.raises(ValueError, match="meta_info lacks micro_batch_size"):
        built.compute_log_prob(data)
    del data.meta_info["temperature"]
    with pytest.raises(ValueError, match="meta_info lacks temperature"):
        built.update_policy(data)


def run_rank(rank: int, folder: Path) -> None:
    """Shard as a caller would, update, and leave the results of this rank."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    with pytest.raises(ValueError, match=r"sharded over no mesh, but the 2 ranks .* mesh of shape \[\(2,\)\]"):
        actor(plain(folder))
    mesh = init_device_mesh("cpu", (2,))
    module = plain(folder)
    for layer in (*module.model.layers, module):
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match=r"sharded over \[\(2,\)\], but .* mesh of shape \[\(2, 1\)\]"):
        actor(module, fsdp_config=FSDPEngineConfig(fsdp_size=1))
    built = actor(module, adamw(module), ppo_mini_batch_size=4)
    rows = EVERY_ROW[rank * 4 : rank * 4 + 4]
    log_probs, _ = built.compute_log_prob(asked(rows))
    metrics = built.update_policy(asked(rows))
    weights = {name: full_tensor(p.detach()).clone() for name, p in module.named_parameters()}
    torch.save((log_probs, metrics, weights), folder / f"rank_{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_ranks_equal_one(folder: Path) -> None:
    spawn_ranks(run_rank, (folder,))
    module = plain(folder)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    built = actor(module, adamw(module))
    log_probs, _ = built.compute_log_prob(asked())
    metrics = built.update_policy(asked())
    parts = [torch.load(folder / f"rank_{rank}.pt") for rank in (0, 1)]
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), log_probs, atol=1e-5, rtol=1e-5)
    for _, values, weights in parts:
        assert values == parts[0][1]
        for name, value in metrics.items():
            assert values[name] == pytest.approx(value, rel=1e-5, abs=1e-6), name
        assert_same_step(before, weights, dict(module.named_parameters()))


def trajectories(pieces: list[list[int]], prompt: int) -> DataProto:
    """Return trajectories of 3 + 6, 3 + 4, 3 + 5 and 3 + 6 tokens, cut into pieces whose prompt is all before them.

    Args: ``pieces`` are (trajectory, first, last) of the tokens of a response; ``prompt`` is the width of prompts.
    """
    generator = torch.Generator().manual_seed(4)
    sizes, width = [6, 4, 5, 6], 6
    tokens = torch.randint(3, cases.VOCAB, (4, 3 + width), generator=generator)
    numbers = {
        name: torch.randn(4, width, generator=generator) for name in ("advantages", "old_log_probs", "ref_log_prob")
    }
    ids = torch.zeros(len(pieces), prompt + width, dtype=torch.int64)
    attended, mask = torch.zeros_like(ids), torch.zeros(len(pieces), width, dtype=torch.int64)
    columns = {name: torch.zeros(len(pieces), width) for name in numbers}
    shares = torch.zeros(len(pieces), dtype=torch.float64)
    for row, (trajectory, first, last) in enumerate(pieces):
        start = prompt - 3 - first
        ids[row, start : prompt + last - first] = tokens[trajectory, : 3 + last]
        attended[row, start : prompt + last - first if last > first else start + 1] = 1
        mask[row, : last - first] = 1
        shares[row] = (last - first) / sizes[trajectory]
        for name, values in numbers.items():
            scale = 0.3 if name == "advantages" else 0.1
            columns[name][row, : last - first] = values[trajectory, first:last] * scale - (name != "advantages") * 3
    tensors = {"input_ids": ids, "attention_mask": attended, "position_ids": (attended.cumsum(-1) - 1).clamp(min=0)}
    tensors |= {"responses": ids[:, prompt:], "response_mask": mask, SHARE_COLUMN: shares} | columns
    return DataProto.from_dict(tensors, meta_info={"temperature": 1.0, "num_trajectories": 4})


@pytest.mark.parametrize("mode", ["seq-mean-token-mean", "seq-mean-token-sum", "token-mean"])
@pytest.mark.parametrize("cut", ["packed, by tokens", "padded"])
def test_segments_train_as_whole_trajectories(folder: Path, mode: str, cut: str) -> None:
    """Two mini-batches of two trajectories, in one row each and in segments; one row fills the second mini-batch."""
    whole = trajectories([[0, 0, 6], [1, 0, 4], [2, 0, 5], [3, 0, 6]], 3)
    pieces = [[0, 0, 2], [0, 2, 3], [0, 3, 6], [1, 0, 4], [2, 0, 1], [2, 1, 5], [3, 0, 6], [0, 0, 0]]
    found = []
    for batch in (whole, trajectories(pieces, 6)):
        module = plain(folder)
        built = actor(
            module,
            adamw(module),
            **({"use_remove_padding": False} | CUTS[cut] | {"ppo_max_token_len_per_gpu": 24}),
            ppo_mini_batch_size=2,
            loss_agg_mode=mode,
        )
        found.append(built.update_policy(batch))
    expected, got = found
    assert len(expected["actor/pg_loss"]) == len(got["actor/pg_loss"]) == 2
    for name in ("actor/pg_loss", "actor/grad_norm", "actor/kl_loss", "actor/ppo_kl"):
        assert got[name][0] == pytest.approx(expected[name][0], rel=1e-5, abs=1e-6), name  # sums in another order
        # AdamW has moved a weight whose gradient is about zero by up to its learning rate.
        assert got[name][1] == pytest.approx(expected[name][1], rel=1e-3, abs=1e-4), name
    assert expected["actor/grad_norm"][0] > 1e-2
