"""Two processes with one engine over both: the same samples on each, and failures told to all."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.ranks import spawn_ranks
from tests.workers.rollout import tiny, vision
from verl.errors import WeightSyncError
from verl.utils import envs

pytest.importorskip("vllm")
pytestmark = pytest.mark.slow


def _start(rank: int, folder: str, key_value_heads: int) -> Any:
    from verl.workers.sharding_manager import build_sharding_manager

    envs.write({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    model = tiny.build_model(num_key_value_heads=key_value_heads)
    changes = {"tensor_model_parallel_size": 2, "mode": "async"}
    rollout = tiny.start_rollout("vllm", model, Path(folder) / str(rank), **changes)
    manager = build_sharding_manager(tiny.TrainerStandIn(model), rollout)
    manager.bucket_bytes = 100 << 10
    return manager


def _check(manager: Any, seed: int) -> list[list[int]]:
    with manager:
        if dist.get_rank() == 1:  # rank 0 pauses the engine before this rank asks for it
            time.sleep(0.1)
        output = manager.rollout.generate_sequences(tiny.prompts_batch(6, seed=seed, repeat=2))
    expected = tiny.reference_log_probs(manager.engine.model, output, tiny.TEMPERATURE)
    torch.testing.assert_close(output.batch["rollout_log_probs"], expected, atol=1e-4, rtol=0)
    return tiny.sampled_tokens(output)


def _check_requests(manager: Any, rank: int) -> None:
    """Requests to rank 0 are answered while the engine is awake, with what a batch gives."""
    prompts = tiny.prompts_batch(6, repeat=2)
    asked = prompts.non_tensor_batch["raw_prompt_ids"]
    sampling = [{"temperature": tiny.TEMPERATURE, "seed": int(seed)} for seed in prompts.batch["sampling_seed"]]

    async def ask_all() -> list[list[int]]:
        asking = [
            asyncio.create_task(
                manager.rollout.generate(asked[row], sampling[row] | {"max_tokens": tiny.RESPONSE_LENGTH}, str(row))
            )
            for row in reversed(range(len(prompts)))
        ]
        given_up = asyncio.create_task(manager.rollout.generate([5], {"stop_token_ids": []}, "given up"))
        await asyncio.sleep(0.01)
        assert await manager.rollout.abort("given up")
        assert (await given_up).finish_reason == "abort"
        with pytest.raises(ValueError, match="the prompt has token 131"):
            await manager.rollout.generate([131], {}, "unknown token")
        return [(await task).token_ids for task in reversed(asking)]

    with manager:
        found = asyncio.run(ask_all()) if rank == 0 else []
        expected = tiny.sampled_tokens(manager.rollout.generate_sequences(prompts))
        assert rank or found == expected


def _run(rank: int, folder: str, key_value_heads: int) -> None:
    manager = _start(rank, folder, key_value_heads)
    first = _check(manager, seed=0)
    _check_requests(manager, rank)
    held = manager.rollout._weights.layout.pieces["model.layers.0.mlp.down_proj.weight"].read()
    assert held.shape == (128, 96)  # half of the columns

    tiny.disturb(manager.engine.model, 0.3, seed=9)
    manager.engine.weights_version += 1
    second = _check(manager, seed=0)
    assert second != first
    samples: list[Any] = [None, None]
    dist.all_gather_object(samples, (first, second))
    assert samples[0] == samples[1]

    manager.engine.weights_version += 1
    load = manager.rollout.load
    if rank == 1:
        manager.rollout.load = lambda bucket: load([(name, tensor.flip(-1)) for name, tensor in bucket])
    with pytest.raises(WeightSyncError, match=r"rank 1: .* differ from what was sent") as caught, manager:
        pytest.fail("the context was entered")
    assert "rank 0" not in str(caught.value)
    assert manager.rollout.weights_version == -1
    manager.rollout.load = load
    _check(manager, seed=1)
    if rank == 0:
        torch.save((first, second), Path(folder) / "samples.pt")
    dist.barrier()
    manager.rollout.shutdown()


def test_two_ranks_share_an_engine(tmp_path: Path) -> None:
    spawn_ranks(_run, (str(tmp_path), 2))
    assert (tmp_path / "samples.pt").exists()


def _run_vision(rank: int, folder: str, kind: str) -> None:
    model, model_config = vision.make_model(Path(folder) / str(rank), kind)  # in a group, rank 0 alone writes
    envs.write({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"})
    store = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    rollout = vision.start("vllm", model, model_config, tensor_model_parallel_size=2)
    asked = vision.prompts(model_config, Path(folder) / str(rank))
    samples = []
    for version in (1, 2):
        tiny.disturb(model, 0.1, seed=version)
        tiny.load_all(rollout, model, version)
        output = rollout.generate_sequences(asked)
        expected = vision.reference_log_probs(model, asked, output, tiny.TEMPERATURE)
        torch.testing.assert_close(output.batch["rollout_log_probs"], expected, atol=1e-4, rtol=0)
        samples.append(tiny.sampled_tokens(output))
    fused = rollout._weights.layout.pieces["visual.blocks.0.attn.qkv.weight"]
    assert fused.read().shape == (96, 64)  # one of two heads
    held = rollout.weights_checksum()
    for name, value in model.named_parameters():
        found = rollout.source_checksum(name, value)
        assert found is not None and held[found[0]] == int(found[1]), name
    everywhere: list[Any] = [None, None]
    dist.all_gather_object(everywhere, samples)
    assert everywhere[0] == everywhere[1]
    if rank == 0:
        torch.save(samples, Path(folder) / "samples.pt")
    dist.barrier()
    rollout.shutdown()


@pytest.mark.full
@pytest.mark.parametrize("kind", ["qwen2_5_vl", "glm4v"])
def test_two_ranks_share_an_engine_that_sees(tmp_path: Path, kind: str) -> None:
    pytest.importorskip("torchvision")
    spawn_ranks(_run_vision, (str(tmp_path), kind))
    assert (tmp_path / "samples.pt").exists()
