"""Let vLLM's engine sleep on a CPU as on a GPU: what it drops is garbage afterwards, here NaN."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from tests.workers.rollout import tiny
from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.sharding_manager import complete

LEVELS = (1, 2)


@torch.no_grad()
def _sleep(worker: Any, level: int = 1) -> None:
    """Drop weights and cache. Level 1 keeps the weights in host memory, and both levels keep the buffers."""
    model = worker.model_runner.get_model()
    kept = dict(model.named_buffers()) | (dict(model.named_parameters()) if level == 1 else {})
    worker.kept = {name: tensor.clone() for name, tensor in kept.items()}
    for tensor in (*model.parameters(), *model.buffers(), *worker.model_runner.kv_caches):
        if tensor.is_floating_point():
            tensor.fill_(torch.nan)


@torch.no_grad()
def _wake_up(worker: Any, tags: list[str] | None = None) -> None:
    model = worker.model_runner.get_model()
    if tags is None or "weights" in tags:
        places = dict(model.named_buffers()) | dict(model.named_parameters())
        for name, tensor in worker.kept.items():
            places[name].copy_(tensor)
    if tags is None or "kv_cache" in tags:
        for cache in worker.model_runner.kv_caches:
            cache.zero_()


@contextmanager
def poisoning_sleep(rollout: Any, level: int) -> Iterator[None]:
    """Let a vLLM rollout that is awake sleep for real at a level; it is awake again afterwards, if need be empty."""
    from vllm.v1.worker.cpu_worker import CPUWorker

    before = rollout._can_sleep, rollout._sleep_level
    rollout._can_sleep, rollout._sleep_level = True, level
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CPUWorker, "sleep", _sleep)
        patch.setattr(CPUWorker, "wake_up", _wake_up)
        try:
            yield
        finally:
            complete(rollout.resume(["weights", "kv_cache"]))
            rollout._can_sleep, rollout._sleep_level = before


def sleep_and_wake(rollout: Any, model: Any) -> None:
    """Release a rollout and wake it with the same weights, as the sharding manager does around a training step."""
    version = rollout.weights_version
    complete(rollout.release())
    complete(rollout.resume(["weights"]))
    if rollout.weights_version == NO_WEIGHTS:
        tiny.load_all(rollout, model, version)
    complete(rollout.resume(["kv_cache"]))
