"""The weight sync into a vLLM engine that sleeps as on a GPU: verified, whole or not at all, and small."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout import sleeping, tiny
from verl.errors import WeightSyncError
from verl.workers.rollout.base import BaseRollout
from verl.workers.sharding_manager import FSDPVLLMShardingManager, build_sharding_manager

pytest.importorskip("vllm")


@pytest.fixture(scope="module")
def rollout_and_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[BaseRollout, Any]]:
    model = tiny.build_model(tied=True)
    rollout = tiny.start_rollout("vllm", model, tmp_path_factory.mktemp("model"))
    yield rollout, model
    rollout.shutdown()


@pytest.fixture
def sleep_level() -> int:
    return 2


@pytest.fixture
def manager(rollout_and_model: tuple[BaseRollout, Any], sleep_level: int) -> Iterator[FSDPVLLMShardingManager]:
    rollout, model = rollout_and_model
    model.load_state_dict(tiny.build_model(tied=True).state_dict())  # steps of tests add up, and so does rounding
    with sleeping.poisoning_sleep(rollout, sleep_level):
        manager = build_sharding_manager(tiny.TrainerStandIn(model), rollout)
        manager.bucket_bytes = 100 << 10
        manager.engine.weights_version = rollout.weights_version + 1
        yield manager


def check_generation(manager: FSDPVLLMShardingManager) -> None:
    with manager:
        output = manager.rollout.generate_sequences(tiny.prompts_batch(8, repeat=2))
    expected = tiny.reference_log_probs(manager.engine.model, output, tiny.TEMPERATURE)
    torch.testing.assert_close(output.batch["rollout_log_probs"], expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("sleep_level", sleeping.LEVELS)
def test_sync_moves_every_byte_once_and_only_when_needed(manager: FSDPVLLMShardingManager, sleep_level: int) -> None:
    """The same weights move again after a sleep of level 2, which has dropped them."""
    tiny.disturb(manager.engine.model, 0.2, seed=11)
    check_generation(manager)
    parameters = list(manager.engine.model.parameters())
    assert manager.last_sync["bytes"] == sum(parameter.nbytes for parameter in parameters)
    assert manager.last_sync["tensors"] == len(parameters)
    assert manager.last_sync["checksum_ok"] == 1
    assert manager.last_sync["unverified_tensors"] == 0
    assert manager.last_sync["version"] == manager.engine.weights_version
    assert manager.is_behind == (sleep_level == 2)

    manager.engine.streamed = 0
    check_generation(manager)
    assert manager.engine.streamed == (0 if sleep_level == 1 else len(parameters))
    assert manager.last_sync.get("tensors", 0) == manager.engine.streamed

    tiny.disturb(manager.engine.model, 0.2, seed=13)
    manager.engine.weights_version += 1
    assert manager.is_behind
    manager.sync()  # before the generation, which does not sync again
    assert not manager.is_behind and manager.last_sync["tensors"] == len(parameters)
    check_generation(manager)
    assert manager.engine.streamed == len(parameters)

    manager.engine.streamed = 0
    tiny.disturb(manager.engine.model, 0.2, seed=12)
    manager.engine.weights_version += 1
    check_generation(manager)
    assert manager.engine.streamed == len(parameters)


@pytest.mark.parametrize("sleep_level", sleeping.LEVELS)
@pytest.mark.parametrize("multi_stage_wake_up", [False, True])
def test_the_cache_wakes_after_the_sync(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch, multi_stage_wake_up: bool, sleep_level: int
) -> None:
    """The buckets use memory that the cache takes later, whatever the established key says."""
    rollout, calls = manager.rollout, []
    resume, load, release = rollout.resume, rollout.load, rollout.release

    async def resumes(tags: list[str]) -> None:
        calls.extend(tags)
        await resume(tags)

    async def releases(tags: list[str] | None = None) -> None:
        calls.append("release")
        await release(tags)

    def loads(bucket: list[tuple[str, torch.Tensor]]) -> None:
        calls.append("load")
        load(bucket)

    monkeypatch.setattr(rollout, "resume", resumes)
    monkeypatch.setattr(rollout, "load", loads)
    monkeypatch.setattr(rollout, "release", releases)
    with tiny.settings(rollout, multi_stage_wake_up=multi_stage_wake_up):
        check_generation(manager)
        check_generation(manager)
    first, again = calls[: calls.index("release") + 1], calls[calls.index("release") + 1 :]
    assert set(first[1:-2]) == {"load"} and [first[0], *first[-2:]] == ["weights", "kv_cache", "release"]
    assert again == (first if sleep_level == 2 else ["weights", "kv_cache", "release"])


def test_peak_memory_stays_below_two_buckets(manager: FSDPVLLMShardingManager) -> None:
    with manager:
        pass
    assert manager.last_sync["buckets"] >= 8
    assert max(parameter.nbytes for parameter in manager.engine.model.parameters()) <= manager.bucket_bytes
    assert 0 < manager.last_sync["peak_bytes"] < 2 * manager.bucket_bytes


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.self_attn.k_proj.weight", "model.norm.weight"]
)
def test_a_bit_that_changes_in_the_engine_is_caught(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    rollout = manager.rollout
    finish = rollout.finish_update

    def finish_and_corrupt(version: int) -> None:
        finish(version)
        held = rollout._weights.layout.pieces[name].read()
        bits = held.view(torch.int32)
        bits[(-1,) * held.dim()] ^= 1  # the last bit of the last element

    monkeypatch.setattr(rollout, "finish_update", finish_and_corrupt)
    with pytest.raises(WeightSyncError, match=f"1 of .* differ from what was sent: {name}"), manager:
        pytest.fail("the context was entered")
    assert rollout.weights_version == -1
    with pytest.raises(RuntimeError, match="no usable weights"):
        rollout.generate_sequences(tiny.prompts_batch(1))
    monkeypatch.undo()
    check_generation(manager)


def test_a_tensor_that_changes_on_the_way_is_caught(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = manager.rollout.load

    def load_swapped(bucket: list[tuple[str, torch.Tensor]]) -> None:
        load([(name, tensor.flip(0) if name.endswith("0.mlp.up_proj.weight") else tensor) for name, tensor in bucket])

    monkeypatch.setattr(manager.rollout, "load", load_swapped)
    with (
        pytest.raises(WeightSyncError, match=r"differ from what was sent: model\.layers\.0\.mlp\.up_proj\.weight"),
        manager,
    ):
        pytest.fail("the context was entered")
    monkeypatch.undo()
    check_generation(manager)


def test_the_stream_is_drained_when_the_load_fails(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(bucket: list[tuple[str, torch.Tensor]]) -> None:
        raise RuntimeError(f"no room for {bucket[0][0]}")

    monkeypatch.setattr(manager.rollout, "load", refuse)
    with pytest.raises(WeightSyncError, match=r"no room for model\.embed_tokens\.weight"), manager:
        pytest.fail("the context was entered")
    assert manager.engine.streamed == len(list(manager.engine.model.parameters()))
    monkeypatch.undo()
    check_generation(manager)


def test_a_trainer_that_leaves_a_tensor_out_is_caught(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = manager.engine.named_weights
    monkeypatch.setattr(
        manager.engine, "named_weights", lambda before: (pair for pair in whole() if pair[0] != "model.norm.weight")
    )
    with pytest.raises(WeightSyncError, match=r"1 tensors .* missing: model\.norm\.weight"), manager:
        pytest.fail("the context was entered")
    monkeypatch.undo()
    check_generation(manager)


def test_fault_point_lies_inside_the_sync(
    manager: FSDPVLLMShardingManager, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VERL_FAULT", "raise:weight_sync:step=4")
    monkeypatch.setenv("VERL_FAULT_FILE", str(tmp_path / "fault"))
    with pytest.raises(RuntimeError, match="injected at weight_sync"):
        manager.sync(step=4)
    assert "weight_sync" in (tmp_path / "fault").read_text()
    with pytest.raises(RuntimeError, match="no usable weights"):
        manager.rollout.generate_sequences(tiny.prompts_batch(1))
    check_generation(manager)
