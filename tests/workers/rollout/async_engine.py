"""vLLM's engine with asynchronous scheduling, as on a GPU, around a device that computes nothing.

Scheduler, batch queue and output are vLLM's own. The device takes a batch when a test lets it, so that one is in
flight at a time that the test knows. A token tells by which weights it was sampled, and from which tokens.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.rollout import tiny
from verl.workers.config import HFModelConfig
from verl.workers.rollout.vllm_rollout import patch
from verl.workers.rollout.vllm_rollout.engine_args import build_engine_args
from verl.workers.rollout.vllm_rollout.importing import import_vllm

import_vllm()
patch.inspect_models_in_process()

from vllm import LLM  # noqa: E402 (the environment comes first)
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.core.sched.async_scheduler import AsyncScheduler  # noqa: E402
from vllm.v1.executor import Executor  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402
from vllm.v1.outputs import ModelRunnerOutput  # noqa: E402


def next_token(tokens: Sequence[int], weights: int) -> int:
    """Return what weights sample after some tokens; the last digit tells which weights."""
    return 10 * (sum(place * token for place, token in enumerate(tokens, 1)) % 12 + 1) + weights


class Device(Executor):
    """Runs batches one after the other, each as soon as ``permits`` has one for it."""

    def _init_executor(self) -> None:
        self.permits = threading.Semaphore(0)
        self.weights = 0
        self.submitted = self.done = 0
        self._work = ThreadPoolExecutor(1)
        self._tokens: dict[str, list[int]] = {}
        self._sampled: Future[Any] = Future()

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        self.submitted += 1
        self._sampled = self._work.submit(self._run, scheduler_output)
        if scheduler_output.total_num_scheduled_tokens:
            done: Future[None] = Future()
            done.set_result(None)
            return done  # the tokens come with ``sample_tokens``
        return self._sampled

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        return self._sampled

    def _run(self, batch: Any) -> ModelRunnerOutput:
        scheduled = batch.num_scheduled_tokens
        if scheduled:
            self.permits.acquire()
        computed = {}
        for new in batch.scheduled_new_reqs:
            self._tokens[new.req_id] = list(new.prompt_token_ids)
            computed[new.req_id] = new.num_computed_tokens
        cached = batch.scheduled_cached_reqs
        computed |= zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        for key in cached.resumed_req_ids:
            self._tokens[key] = list(cached.all_token_ids[key])
        sampled = []
        for key, count in scheduled.items():
            tokens = self._tokens[key]
            is_complete = computed[key] + count >= len(tokens)
            sampled.append([next_token(tokens, self.weights)] if is_complete else [])
            tokens.extend(sampled[-1])
        self.done += 1
        return ModelRunnerOutput(list(scheduled), {key: row for row, key in enumerate(scheduled)}, sampled)

    def collective_rpc(
        self, method: Any, timeout: float | None = None, args: Any = (), kwargs: Any = None, non_block: bool = False
    ) -> Any:
        if method == "synchronize_device":
            self.settle()
        cache = FullAttentionSpec(block_size=32, num_kv_heads=2, head_size=32, dtype=torch.float32)
        answers = {
            "get_kv_cache_spec": {"layer": cache},
            "get_supported_kv_cache_layouts": ["LBNHC"],
            "determine_available_memory": 1 << 22,
            "get_supported_tasks": ("generate",),
        }
        return [answers[method]] if method in answers else []

    def settle(self) -> None:
        """Wait until nothing is left to run; the permits must suffice."""
        self._work.submit(lambda: None).result()

    def check_health(self) -> None:
        pass

    def shutdown(self) -> None:
        self._work.shutdown()


@contextmanager
def started(folder: Path) -> Iterator[tuple[LLM, Device]]:
    """Start an engine for the model of a folder, and end it."""
    own = CpuPlatform.check_and_update_config.__func__  # type: ignore[attr-defined]

    def stay_asynchronous(platform: Any, config: Any) -> None:
        own(platform, config)
        config.scheduler_config.async_scheduling = True

    tiny.build_model().config.save_pretrained(folder)
    config = tiny.rollout_config("vllm", mode="async", max_model_len=64)
    args = build_engine_args(config, HFModelConfig(path=str(folder), load_tokenizer=False))
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(CpuPlatform, "check_and_update_config", classmethod(stay_asynchronous))
        llm = LLM(**args | {"distributed_executor_backend": Device, "async_scheduling": True})
    core: Any = llm.llm_engine.engine_core
    assert isinstance(core.engine_core.scheduler, AsyncScheduler) and core.engine_core.batch_queue_size == 2
    try:
        yield llm, core.engine_core.model_executor
    finally:
        core.shutdown()
