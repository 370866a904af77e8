"""One copy of the weights for trainer and vLLM: both compute with it, and whatever parts them is found."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.workers.engine import cases
from tests.workers.rollout import tiny
from verl.errors import WeightSyncError, WrongInput
from verl.protocol import DataProto
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import FSDPEngine
from verl.workers.engine.fsdp.engine import FSDPEngineWithLMHead
from verl.workers.rollout import build_rollout
from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager import HybridShardingManager, build_sharding_manager
from verl.workers.sharding_manager.shared_weights import SharedWeights, flipped, probe_tokens

ATTENTION = "model.layers.0.self_attn"
BF16 = {"model_dtype": "bf16", "mixed_precision": {"param_dtype": "bf16", "reduce_dtype": "fp32"}}
"""One process is wrapped by FSDP2, which sums gradients in fp32."""


def write_model(folder: Path) -> Path:
    """Write a model with tied embeddings, a padded vocabulary, and a key projection of the shape of the query's."""
    tiny.build_model(tied=True, num_key_value_heads=4).save_pretrained(folder)
    return folder


def start_engine(folder: Path, node: dict[str, Any] | None = None, **model: Any) -> FSDPEngine:
    engine = FSDPEngineWithLMHead(
        HFModelConfig(path=str(folder), load_tokenizer=False, use_remove_padding=True, **model),
        FSDPEngineConfig(strategy="fsdp2", **(node or {})),
        FSDPOptimizerConfig(lr=1e-2),
        CheckpointConfig(save_contents=["model", "optimizer", "extra", "hf_model"]),
    )
    engine.initialize()
    return engine


def batch(seed: int) -> DataProto:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, tiny.VOCABULARY, (4, 12), generator=generator)
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "position_ids": torch.arange(12).expand(4, 12).clone(),
        "responses": ids[:, 6:].clone(),
        "response_mask": torch.ones(4, 6, dtype=torch.long),
        "advantages": torch.randn(4, 6, generator=generator),
    }
    return DataProto.from_dict(tensors=tensors, meta_info={"temperature": 1.0, "calculate_entropy": True})


def train(engine: FSDPEngine, steps: int, first: int = 0) -> list[dict[str, float]]:
    metrics = []
    for step in range(first, first + steps):
        with engine.train_mode():
            metrics.append(engine.train_batch(batch(step), cases.loss_fn))
    return metrics


# Between a trainer and vLLM


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HybridShardingManager]:
    pytest.importorskip("vllm")
    engine = start_engine(write_model(tmp_path_factory.mktemp("model")))
    config = tiny.rollout_config("vllm", mode="async", free_cache_engine=False, max_model_len=64)
    rollout = build_rollout(config, engine.model_config, engine)
    manager = build_sharding_manager(engine, rollout)
    manager.share_weights()
    yield manager
    rollout.shutdown()


def check_generation(manager: HybridShardingManager) -> None:
    with manager:
        output = manager.rollout.generate_sequences(tiny.prompts_batch(8, repeat=2))
    expected = tiny.reference_log_probs(manager.engine.module, output, tiny.TEMPERATURE)
    torch.testing.assert_close(output.batch["rollout_log_probs"], expected, atol=1e-4, rtol=0)


def test_steps_and_syncs(manager: HybridShardingManager) -> None:
    """Each step of the optimizer is one of the engine, which generates by the new weights and from no old prefix."""
    engine, rollout = manager.engine, manager.rollout
    places = rollout.weight_places(engine.resident_weights())
    moved = {name: place.clone() for name, place in places.items()}
    for step in range(3):
        train(engine, 1, step)
        assert manager.is_behind
        check_generation(manager)
        assert not manager.is_behind and rollout.weights_version == engine.weights_version
        sync = manager.last_sync
        assert [sync[name] for name in ("bytes", "tensors", "buckets", "peak_bytes", "unverified_tensors")] == [0] * 5
        assert sync["shared_tensors"] == len(engine.resident_weights()) == len(moved)
        assert 0 < sync["probe_gap"] < 1e-4 and "checksum_ok" not in sync
        check_generation(manager)
        assert manager.last_sync == {}  # nothing had changed
    assert all(not torch.equal(place, moved[name]) for name, place in places.items())
    assert {p.untyped_storage().data_ptr() for p in engine.module.parameters()} == {
        p.untyped_storage().data_ptr() for p in rollout._weights._model.parameters()
    }


def test_cached_prefixes_go_with_each_step(manager: HybridShardingManager) -> None:
    """The prompt is longer than a block of the cache, whose keys and values would be those of the old weights."""
    ids = torch.randint(3, tiny.VOCABULARY, (1, 50), generator=torch.Generator().manual_seed(4))
    params = {"max_tokens": 1, "temperature": 1.0, "seed": 1}

    async def log_prob() -> tuple[int, float]:
        await manager.give_to_rollout()
        output = await manager.rollout.generate(ids[0].tolist(), params, "long")
        await manager.give_to_trainer()
        return output.token_ids[0], output.log_probs[0]

    before: dict[int, float] = {}
    for step in range(20, 23):
        train(manager.engine, 1, step)
        token, found = asyncio.run(log_prob())
        with torch.no_grad():
            scores = manager.engine.module(input_ids=ids, use_cache=False).logits[0, -1].log_softmax(-1)
        assert found == pytest.approx(scores[token].item(), abs=1e-4)
        assert not before or abs(before[token] - found) > 1e-2  # the old weights would give another one
        before = dict(enumerate(scores.tolist()))


def test_a_request_of_before_the_step_goes_on_with_the_new_weights(manager: HybridShardingManager) -> None:
    """The engine stands still while the trainer steps, whatever ``free_cache_engine`` says; the probe loses nothing."""
    rollout: Any = manager.rollout
    params = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True}

    async def run() -> None:
        await manager.give_to_rollout()
        steps = rollout._llm.llm_engine.step
        reached, entered = asyncio.Event(), asyncio.get_running_loop()

        def step() -> Any:
            output = steps()
            entered.call_soon_threadsafe(reached.set)
            rollout._loop._inbox.put(_pause())
            return output

        rollout._llm.llm_engine.step = step
        late = asyncio.create_task(rollout.generate([5, 6, 7], params, "late"))
        await reached.wait()
        rollout._llm.llm_engine.step = steps
        await manager.give_to_trainer()
        assert not rollout.is_idle
        done = rollout._loop.steps
        train(manager.engine, 1, first=7)
        assert rollout._loop.steps == done and not late.done()
        await manager.give_to_rollout()
        output = await late
        assert len(output.token_ids) == 8
        await manager.give_to_trainer()
        with torch.no_grad():
            ids = torch.tensor([[5, 6, 7, *output.token_ids]])
            logits = manager.engine.module(input_ids=ids, use_cache=False).logits[0]
        assert logits[3:-1].argmax(-1).tolist() == output.token_ids[1:]  # all but the first are of the new weights

    asyncio.run(run())
    check_generation(manager)


def _pause() -> Any:
    from verl.workers.rollout.vllm_rollout.engine_loop import _Switch

    return _Switch(paused=True)


def trainer_copy(manager: HybridShardingManager) -> None:
    parameter = manager.engine.module.get_parameter(f"{ATTENTION}.k_proj.weight")
    parameter.data = parameter.data.clone()


def engine_copy(manager: HybridShardingManager) -> None:
    layer = manager.rollout._weights._model.get_submodule(f"{ATTENTION}.qkv_proj")
    layer.weight = nn.Parameter(layer.weight.detach().clone(), requires_grad=False)


def off_by_one(manager: HybridShardingManager) -> None:
    parameter = manager.engine.module.get_parameter(f"{ATTENTION}.k_proj.weight")
    held = parameter.data
    parameter.data = held.as_strided(held.shape, held.stride(), held.storage_offset() + 1)


def another_shape(manager: HybridShardingManager) -> None:
    layer = manager.rollout._weights._model.get_submodule("model.norm")
    layer.weight = nn.Parameter(layer.weight.detach()[:64].clone(), requires_grad=False)


def swapped(manager: HybridShardingManager) -> None:
    """Trust a table that takes key for query, as if vLLM stacked them in another order: all addresses agree."""
    names = [f"{ATTENTION}.{part}_proj.{kind}" for part in "qk" for kind in ("weight", "bias")]
    pieces, module = manager.rollout._weights.layout.pieces, manager.engine.module
    values = {name: module.get_parameter(name).detach().clone() for name in names}
    for first, second in zip(names[:2], names[2:], strict=True):
        pieces[first], pieces[second] = pieces[second], pieces[first]
    with torch.no_grad():
        for name, place in manager.rollout.weight_places(manager.engine.resident_weights()).items():
            if name in values:
                module.get_parameter(name).data = place.copy_(values[name])


def hidden_copy(manager: HybridShardingManager) -> None:
    """Let a layer compute with a copy that nobody can look up, as a packed one; the next step leaves it behind."""
    layer = manager.rollout._weights._model.get_submodule("model.layers.1.mlp.down_proj")
    kept = layer.weight.detach().clone()
    layer.cpu_linear = lambda x, weight, bias: nn.functional.linear(x, kept, bias)


def diverged(manager: HybridShardingManager) -> None:
    with torch.no_grad():
        manager.engine.module.get_parameter("model.norm.weight")[0] = torch.nan


@pytest.mark.parametrize(
    "harm, message",
    [
        (trainer_copy, rf"1 of 26 tensors .* not the same memory: {ATTENTION}\.k_proj\.weight \(another storage\)"),
        (engine_copy, rf"3 of 26 tensors .* not the same memory: {ATTENTION}\.q_proj\.weight \(another storage\)"),
        (off_by_one, rf"{ATTENTION}\.k_proj\.weight \(elements from 16385 there, from 16384 in the engine\)"),
        (another_shape, r"model\.norm\.weight \(\(128,\) torch.float32 there, \(64,\) torch.float32 in the engine\)"),
        (swapped, "log-probability of the probe that differs by .* more than 0.0001"),
        (diverged, "the trainer gives the probe log-probabilities that are not finite"),
        (hidden_copy, "log-probability of the probe that differs by .* more than 0.0001"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_parts_them_is_found(
    manager: HybridShardingManager, restored: None, harm: Callable[[HybridShardingManager], None], message: str
) -> None:
    harm(manager)
    train(manager.engine, 1)
    manager.engine.weights_version += 1  # a step without a finite gradient is skipped
    with pytest.raises(WeightSyncError, match=message), manager:
        pytest.fail("the context was entered")
    assert manager.rollout.weights_version == -1
    with pytest.raises(RuntimeError, match="no usable weights"):
        manager.rollout.generate_sequences(tiny.prompts_batch(1))


@pytest.fixture
def restored(manager: HybridShardingManager) -> Iterator[None]:
    """Put tables, views and layers back as they were, after which trainer and engine agree again."""
    weights = manager.rollout._weights
    pieces = dict(weights.layout.pieces)
    places = weights.places(manager.engine.resident_weights())
    held = {name: place.clone() for name, place in places.items()}
    layers = {layer: (dict(layer._parameters), layer.__dict__.get("cpu_linear")) for layer in weights._model.modules()}
    yield
    weights.layout.pieces = pieces
    for layer, (parameters, product) in layers.items():
        layer._parameters.update(parameters)
        if product is not None:
            layer.cpu_linear = product
    with torch.no_grad():
        for name, place in places.items():
            manager.engine.module.get_parameter(name).data = place.copy_(held[name])
    manager.engine.weights_version += 1
    check_generation(manager)


def test_the_flipped_probe_finds_a_fresh_copy_of_any_tensor(manager: HybridShardingManager) -> None:
    """A copy that has just been made has the right values: only weights that differ from it show it."""
    shared, rollout = manager.shared, manager.rollout
    places = rollout.weight_places(manager.engine.resident_weights())
    score = rollout.prompt_log_probs
    before = {name: place.clone() for name, place in places.items()}
    for name, place in places.items():

        def stale(prompts: Any, place: Tensor = place) -> list[list[float]]:
            with flipped([place]):  # once more: the engine computes with the values from before
                return score(prompts)

        rollout.prompt_log_probs = stale
        try:
            with flipped(places.values()), pytest.raises(WeightSyncError, match="of the probe that differs"):
                shared.check_probe()
        finally:
            del rollout.prompt_log_probs
        assert torch.equal(place, before[name]), name


def test_a_checkpoint_is_loaded_in_place(manager: HybridShardingManager, tmp_path: Path) -> None:
    engine = manager.engine
    engine.save_checkpoint(str(tmp_path))
    saved = {name: tensor.clone() for name, tensor in engine.resident_weights().items()}
    train(engine, 2)
    engine.load_checkpoint(str(tmp_path))
    assert all(torch.equal(tensor, saved[name]) for name, tensor in engine.resident_weights().items())
    check_generation(manager)
    assert manager.last_sync["shared_tensors"] == len(saved)
    from safetensors.torch import load_file

    exported = load_file(next(tmp_path.glob("**/model.safetensors")))
    assert exported.keys() == saved.keys() and all(torch.equal(exported[name], saved[name]) for name in saved)


# The trainer alone


def memory_for(engine: FSDPEngine) -> dict[str, Tensor]:
    """Return places for all weights in one block, as an engine that merges everything has them."""
    tensors = engine.resident_weights()
    places, start = {}, 3  # no place is aligned to more than an element
    size = start + sum(tensor.numel() for tensor in tensors.values())
    block = torch.empty(size, dtype=tensors["model.norm.weight"].dtype)
    for name, tensor in tensors.items():
        places[name] = block[start : start + tensor.numel()].view(tensor.shape)
        start += tensor.numel()
    return places


@pytest.mark.parametrize("node", [{}, BF16], ids=["plain", "wrapped"])
def test_training_in_other_memory_is_the_same_training(tmp_path: Path, node: dict[str, Any]) -> None:
    """Metrics, weights and a checkpoint of a trainer whose weights have moved, between two steps, are equal."""
    write_model(tmp_path / "model")
    whole, moved = (start_engine(tmp_path / "model", node, enable_gradient_checkpointing=True) for _ in range(2))
    first = train(whole, 1), train(moved, 1)
    places = memory_for(moved)
    moved.move_weights(places)
    assert first[0] == first[1] and train(whole, 2, 1) == train(moved, 2, 1)
    pairs = list(zip(whole.resident_weights().items(), moved.resident_weights().items(), strict=True))
    assert all(torch.equal(one, other) and name == also for (name, one), (also, other) in pairs)
    assert all(other.data_ptr() == places[name].data_ptr() for _, (name, other) in pairs)
    whole.save_checkpoint(str(tmp_path / "checkpoint"))
    train(moved, 1)
    moved.load_checkpoint(str(tmp_path / "checkpoint"))
    assert train(whole, 1) == train(moved, 1)
    assert all(tensor.data_ptr() == places[name].data_ptr() for name, tensor in moved.resident_weights().items())


def test_models_that_cannot_be_shared(tmp_path: Path) -> None:
    write_model(tmp_path / "dense")
    adapters = start_engine(tmp_path / "dense", lora_rank=4, target_modules="all-linear")
    with pytest.raises(WrongInput, match="adapters are merged into a copy"):
        adapters.resident_weights()
    changes = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48, "decoder_sparse_step": 1}
    cases.write_family(tmp_path / "experts", "Qwen3Moe", changes)
    experts = start_engine(tmp_path / "experts")
    with pytest.raises(WrongInput, match=r"holds tensor 'model\.layers\.0\.mlp\.experts.* in another form"):
        experts.resident_weights()


# Without an engine


class Holder(BaseRollout):
    """An engine that holds what it is given."""

    generate_sequences = load = weights_checksum = source_checksum = None
    is_idle = True

    def __init__(self, places: dict[str, Tensor]) -> None:
        self.places, self._version, self._usable = places, 1, True
        self.config: Any = SimpleNamespace(context_length=32)

    def weight_places(self, names: Any) -> dict[str, Tensor]:
        return {name: self.places[name] for name in names}


@pytest.mark.parametrize(
    "harm, message",
    [
        (lambda tensor: tensor.double(), "has dtype torch.float32 in the trainer and torch.float64 in the rollout"),
        (lambda tensor: tensor[:1], r"has shape torch.Size\(\[131, 128\]\) in the trainer"),
        (lambda tensor: tensor.to("meta"), "has device cpu in the trainer and meta in the rollout engine"),
        (lambda tensor: tensor.t().contiguous().t(), "in memory that cannot be trained in place"),
    ],
    ids=["dtype", "shape", "device", "layout"],
)
def test_memory_of_another_form_is_refused(tmp_path: Path, harm: Callable[[Tensor], Tensor], message: str) -> None:
    engine = start_engine(write_model(tmp_path))
    places = memory_for(engine)
    places["model.embed_tokens.weight"] = harm(places["model.embed_tokens.weight"])
    before = engine.resident_weights()
    with pytest.raises(WrongInput, match=f"share_weights=true: model.embed_tokens.weight {message}|{message}"):
        SharedWeights(engine, Holder(places))
    assert all(tensor.data_ptr() == before[name].data_ptr() for name, tensor in engine.resident_weights().items())


def test_an_engine_with_requests_and_one_that_cannot_share_are_refused(tmp_path: Path) -> None:
    engine = start_engine(write_model(tmp_path))
    holder = Holder(memory_for(engine))
    holder.is_idle = False
    with pytest.raises(WeightSyncError, match="while the rollout engine has requests"):
        SharedWeights(engine, holder)
    del Holder.weight_places
    with pytest.raises(WrongInput, match="share_weights=true: Holder cannot share weights"):
        SharedWeights(engine, holder)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_flip_changes_every_value_and_is_undone_bit_for_bit(dtype: torch.dtype) -> None:
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
    values[:4] = torch.tensor([0.0, -0.0, float("inf"), torch.finfo(dtype).tiny / 4])
    before = values.clone()
    with pytest.raises(RuntimeError, match="half way"), flipped([values]):
        ratio = (values / before)[4:].float()
        assert ratio.min() > 0.6 and ratio.max() < 1.51 and (ratio - 1).abs().min() > 0.2
        raise RuntimeError("half way")
    integers = torch.int32 if dtype == torch.float32 else torch.int16
    assert torch.equal(values.view(integers), before.view(integers))


def test_probe_tokens_stand_for_no_image(tmp_path: Path) -> None:
    from transformers import Qwen2Config

    config = Qwen2Config(vocab_size=20, bos_token_id=3, eos_token_id=[4, 5], pad_token_id=0)
    config.image_token_id, config.video_token_index = 7, 8
    rows = probe_tokens(config, context_length=64).batch
    found = set(rows["input_ids"].flatten().tolist())
    assert found <= set(range(20)) - {0, 3, 4, 5, 7, 8} and len(found) > 5
    assert rows["input_ids"].shape == (2, 8) and torch.equal(rows["responses"], rows["input_ids"][:, 1:])
    assert torch.equal(probe_tokens(config, 64).batch["input_ids"], probe_tokens(config, 64).batch["input_ids"])
    assert probe_tokens(config, context_length=6).batch["input_ids"].shape == (2, 5)
