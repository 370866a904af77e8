"""One rank computes with copies of its weights, bit for bit as ``fully_shard`` does.

Both round the same weights and inputs, and sum the same gradients in the same order, so no tolerance is needed.
"""

from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from tests.workers.engine import cases, sharing_cases
from tests.workers.engine import vision_cases as vision
from verl.algos.aggregate import agg_sum
from verl.utils.fsdp_utils import full_tensor
from verl.workers.config import FSDPActorConfig
from verl.workers.engine.fsdp import compute_copies
from verl.workers.engine.fsdp.build import use_packed_attention
from verl.workers.engine.passes import PassSpec
from verl.workers.roles.own_actor import DataParallelPPOActor

BF16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}


@pytest.fixture(scope="module", autouse=True)
def own_group() -> Iterator[None]:
    """End the group of one process that a wrapped engine starts."""
    yield
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("copies")
    cases.write_model(root / "plain")
    cases.write_model(root / "tied", tie_word_embeddings=True)
    cases.write_family(root / "experts", "Glm4Moe", cases.SIGMOID)
    vision.write_with_positions(root / "vision", "qwen2_5_vl")
    return root


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Build an engine that computes in bf16, wrapped or with copies."""
    limit = compute_copies.WHOLE_MODEL_BYTES

    def make(path: Path, wrapped: bool, shares: bool = False, kind: str = "language_model", **model: Any) -> Any:
        monkeypatch.setattr(compute_copies, "WHOLE_MODEL_BYTES", 0 if wrapped else limit)
        engine = sharing_cases.build(path, shares, kind, BF16, **model)
        assert isinstance(engine.module, FSDPModule) is wrapped
        return engine

    return make


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(full_tensor(tensor), full_tensor(expected[name])), name


def step(engine: Any, data: Any) -> dict[str, float]:
    data.meta_info.setdefault("micro_batch_size_per_gpu", 5)
    with engine.train_mode():
        return engine.train_batch(data, cases.loss_fn)


@pytest.mark.parametrize(
    ("family", "shares", "kind", "model"),
    [
        ("plain", False, "language_model", {}),
        ("plain", True, "language_model", sharing_cases.FUSED),
        ("plain", False, "language_model", {"lora_rank": 4, "lora_alpha": 8}),
        ("plain", False, "value_model", {"use_remove_padding": False}),
        ("tied", False, "language_model", {"enable_gradient_checkpointing": True, "enable_activation_offload": True}),
        ("experts", False, "language_model", {}),
        ("vision", True, "language_model", {}),
    ],
)
def test_numbers_of_fully_shard(
    folder: Path, build: Any, family: str, shares: bool, kind: str, model: dict[str, Any]
) -> None:
    path = folder / family
    data = vision.samples_of_prompts(path, "qwen2_5_vl") if family == "vision" else sharing_cases.groups()
    data.meta_info.update(micro_batch_size_per_gpu=5)
    wrapped, copies = (build(path, wraps, shares, kind, **model) for wraps in (True, False))
    assert_equal(sharing_cases.outputs(copies, data), sharing_cases.outputs(wrapped, data))
    (metrics, found), (expected, gradient) = (sharing_cases.gradients(engine, data) for engine in (copies, wrapped))
    assert metrics == expected
    assert_equal(found, gradient)
    assert all(tensor.dtype == torch.float32 for tensor in found.values())
    for _ in range(2):
        assert step(copies, data) == step(wrapped, data)
    assert_equal(dict(copies.named_weights()), dict(wrapped.named_weights()))


def test_a_reference_computes_in_the_same_dtype(folder: Path, build: Any) -> None:
    """The engine of a reference runs in passes of the policy."""
    divergences = []
    for wrapped in (True, False):
        engine, reference = (build(folder / name, wrapped) for name in ("plain", "tied"))
        engine.set_reference(reference)
        with engine.eval_mode():
            divergences.append(engine.infer_batch(sharing_cases.groups(), PassSpec(full_kl=True)))
    assert_equal(*divergences)


def test_adapters_are_left_out_in_the_middle_of_a_pass(folder: Path, build: Any) -> None:
    """For the reference of the full divergence; that makes them need no gradient for a while."""

    def loss(output: dict[str, Tensor], rows: Any) -> Any:
        total = agg_sum(output["full_kl"] - output["log_probs"], rows.batch["response_mask"], "token-mean")
        return [total], {"loss": total}

    found = []
    for wrapped in (True, False):
        engine = build(folder / "plain", wrapped, lora_rank=4, lora_alpha=8)
        step(engine, sharing_cases.groups())  # adapters that change nothing would have no divergence
        engine.set_reference(None)
        with engine.train_mode():
            engine.forward_backward_batch(sharing_cases.groups(), loss, spec=PassSpec(micro_batch_size=5, full_kl=True))
            gradients = {name: p.grad for name, p in engine.module.named_parameters() if p.grad is not None}
        found.append(gradients)
        assert len(gradients) > 20 and any(full_tensor(gradient).any() for gradient in gradients.values())
    assert_equal(*found)


@pytest.mark.parametrize("saved_wrapped", [True, False])
def test_a_checkpoint_of_the_other_kind_is_resumed(
    folder: Path, build: Any, tmp_path: Path, saved_wrapped: bool
) -> None:
    data = sharing_cases.groups()
    first, other = (build(folder / "plain", wrapped) for wrapped in (saved_wrapped, not saved_wrapped))
    step(first, data)
    first.save_checkpoint(str(tmp_path / "actor"), global_step=1)
    other.load_checkpoint(str(tmp_path / "actor"))
    assert step(other, data) == step(first, data)
    assert_equal(dict(other.named_weights()), dict(first.named_weights()))


def test_a_large_model_is_wrapped_unless_its_weights_may_stay_gathered(
    folder: Path, build: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder / "plain", True)
    monkeypatch.setattr(compute_copies, "WHOLE_MODEL_BYTES", 0)
    node = BF16 | {"reshard_after_forward": False}
    kept = sharing_cases.build(folder / "plain", False, engine=node)
    assert not isinstance(kept.module, FSDPModule)
    reduced_in_bf16 = {"mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "bf16"}}
    assert isinstance(sharing_cases.build(folder / "plain", False, engine=node | reduced_in_bf16).module, FSDPModule)


def test_weights_come_back_after_an_error(folder: Path, build: Any) -> None:
    engine = build(folder / "plain", False)
    own = dict(engine.module.named_parameters())
    before = len(engine.module._forward_pre_hooks)
    with pytest.raises(ZeroDivisionError), engine.train_mode():
        engine.forward_backward_batch(sharing_cases.groups(), lambda output, rows: 1 / 0)
    with pytest.raises((TypeError, ValueError)), torch.no_grad():
        engine.module("no ids")
    assert all(parameter is own[name] for name, parameter in engine.module.named_parameters())
    assert len(engine.module._forward_pre_hooks) == before


def test_another_module_computes_in_the_same_dtype(folder: Path, build: Any) -> None:
    """A module of a user: a copy, one that he has built, one that he has sharded."""
    data = sharing_cases.groups()
    engine = build(folder / "plain", False)
    expected = sharing_cases.outputs(engine, data)
    own = cases.load(folder / "plain")
    use_packed_attention(own)
    for module in (deepcopy(engine.module), own):
        engine.adopt(module, None, None)
        assert_equal(sharing_cases.outputs(engine, data), expected)
    sharded = fully_shard(deepcopy(own), mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    engine.adopt(sharded, None, None)
    assert_equal(sharing_cases.outputs(engine, data), expected)
    fp32 = fully_shard(deepcopy(own), mp_policy=MixedPrecisionPolicy())  # his dtypes count, for inputs too
    engine.adopt(fp32, None, None)
    assert not torch.equal(sharing_cases.outputs(engine, data)["log_probs"], expected["log_probs"])
    seen = []
    fp32.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs["inputs_embeds"].dtype), with_kwargs=True)
    with torch.no_grad():
        fp32(inputs_embeds=torch.zeros(1, 4, 64), position_ids=torch.arange(4)[None])
    assert seen == [torch.float32]


@pytest.mark.parametrize("checkpoints", [False, True])
def test_a_module_that_is_called_or_wrapped_by_the_code_of_a_user(folder: Path, build: Any, checkpoints: bool) -> None:
    """Its loss, gradient, and log-probabilities by an actor around it, as with a module that ``fully_shard`` wraps."""
    ids = torch.arange(3, 23)[None]
    found, scored = [], []
    for wrapped in (True, False):
        engine = build(folder / "plain", wrapped, enable_gradient_checkpointing=checkpoints)
        with torch.no_grad():
            found.append([engine.module(ids, position_ids=torch.arange(20)[None]).logits])
        if not checkpoints:
            engine.module.train()
            engine.module(ids, labels=ids).loss.backward()
            found[-1] += [full_tensor(parameter.grad) for parameter in engine.module.parameters()]
        config = FSDPActorConfig(strategy="fsdp", ppo_micro_batch_size_per_gpu=4, use_remove_padding=True)
        data = sharing_cases.groups()
        data.meta_info.update(micro_batch_size=4)
        scored.append(DataParallelPPOActor(config, engine.module).compute_log_prob(data)[0])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
    assert found[0][0].dtype == torch.bfloat16 and torch.equal(*scored)
