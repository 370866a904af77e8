"""Generation by a vLLM engine in the process of the worker."""

import gc
import logging
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.protocol import DataProto, tensors_of
from verl.utils import envs
from verl.utils.device import get_device_name
from verl.utils.engine_versions import check_vllm, is_version_ge
from verl.utils.failures import on_failure
from verl.utils.faults import fault_point
from verl.workers.config.engines import ENGINES
from verl.workers.rollout.base import (
    BaseRollout,
    Bucket,
    check_prompt_lengths,
    preserved_random_state,
    prompt_token_ids,
    sampling_values,
)
from verl.workers.rollout.engine_settings import is_batch_invariant
from verl.workers.rollout.expansion import check_expansion
from verl.workers.rollout.vllm_rollout import patch
from verl.workers.rollout.vllm_rollout.engine_args import build_engine_args
from verl.workers.rollout.vllm_rollout.importing import import_vllm
from verl.workers.rollout.vllm_rollout.media import Request, requests_of, use_training_positions
from verl.workers.rollout.vllm_rollout.requests import NO_SEED, flat_log_probs, greedy_seed
from verl.workers.rollout.vllm_rollout.sockets import collect_sockets
from verl.workers.rollout.vllm_rollout.weights import EngineWeights

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from vllm import RequestOutput, SamplingParams

    from verl.workers.config import HFModelConfig, RolloutConfig

logger = logging.getLogger(__name__)


class vLLMRollout(BaseRollout):
    """One vLLM engine per tensor-parallel group; all ranks of a group get the same prompts and run in step.

    Start it after ``torch.distributed.init_process_group``. It preserves the trainer's random state. On a CPU, vLLM
    turns ``torch.set_num_threads`` into a no-op, so set ``OMP_NUM_THREADS`` before the process starts.
    """

    facts = ENGINES["vllm"]._replace(modes=("sync",))

    def __init__(
        self, config: "RolloutConfig", model_config: "HFModelConfig", device_mesh: "DeviceMesh | None" = None
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self._asleep: set[str] = set()
        check_vllm(self.facts.modes[0])
        with preserved_random_state():
            vllm = import_vllm(batch_invariant=is_batch_invariant(config))
            patch.inspect_models_in_process()
            with _shared_memory_named():
                args = build_engine_args(config, model_config)
                started = time.perf_counter()
                self._llm = vllm.LLM(**args)
        self._can_sleep = bool(args.get("enable_sleep_mode", False))
        self._sleep_level = sleep_level(config)
        worker = self._llm.collective_rpc(lambda worker: worker)[0]
        runner = worker.model_runner
        device = torch.device(runner.device)
        is_unread = config.load_format == "dummy"
        self._weights = EngineWeights(runner.get_model(), runner.model_config, device, is_unread)
        use_training_positions(runner.get_model(), model_config.hf_config)
        logger.info("vLLM engine started in %.1f s", time.perf_counter() - started)
        self._caches = runner.kv_caches if config.free_cache_engine and device.type == "cpu" else []

    @classmethod
    def import_engine(cls, config: "RolloutConfig") -> None:
        """Import vLLM, and exclude all present objects from garbage collection.

        vLLM collects garbage five times when it starts, and each collection visits every object that is not frozen.
        """
        with preserved_random_state():
            import_vllm(batch_invariant=is_batch_invariant(config))
        gc.collect()
        gc.freeze()

    def shutdown(self) -> None:
        """End the engine and all process groups of this process, including the trainer's."""
        self._llm.llm_engine.engine_core.shutdown()

    # ---- generation

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response for each prompt; see ``BaseRollout``.

        A response depends on its prompt, its ``sampling_seed`` and the weights, not on the other rows of the batch.

        Raises: RuntimeError without usable weights, or if the engine turns images into other tokens than the data set;
            ValueError if a prompt is too long.
        """
        self._check_usable()
        token_ids = prompt_token_ids(prompts)
        room = self._llm.model_config.max_model_len - self.config.response_length
        check_prompt_lengths(token_ids, tensors_of(prompts)["attention_mask"], room)
        params = self._sampling_params(prompts)
        requests = requests_of(prompts, token_ids)
        started = time.perf_counter()
        with preserved_random_state():
            finished = self._run(requests, params, prompts.meta_info.get("global_steps"))
        elapsed = time.perf_counter() - started
        expanded = [
            (output.prompt_token_ids or []) if "multi_modal_data" in request else None
            for request, output in zip(requests, finished, strict=True)
        ]
        check_expansion(prompts, expanded, "vllm")
        outputs = [output.outputs[0] for output in finished]
        responses = [list(output.token_ids) for output in outputs]
        log_probs = [flat_log_probs(output) for output in outputs] if self.config.calculate_log_probs else None
        truncated = sum(output.finish_reason == "length" for output in outputs)
        return self._finished(prompts, responses, log_probs, elapsed, truncated)

    def _sampling_params(self, prompts: DataProto) -> "list[SamplingParams]":
        from vllm import SamplingParams

        values = sampling_values(prompts, self.config)
        values["top_k"] = max(0, int(values["top_k"]))
        drawn = self._sampling_seeds(prompts)
        seeds: Sequence[int | None] = [greedy_seed(self.config)] * len(prompts)
        if drawn is not None:
            seeds = [int(self.seeds.draw(1)) if seed == NO_SEED else seed for seed in drawn]
        common: dict[str, Any] = {
            "n": 1,
            "max_tokens": self.config.response_length,
            "ignore_eos": True,  # the batch gives eos_token_id; the model's folder must not
            "stop_token_ids": self._end_tokens(prompts),
            "detokenize": False,
            "logprobs": 0 if self.config.calculate_log_probs else None,
            "flat_logprobs": True,
            "skip_clone": True,
        } | values
        return [SamplingParams(seed=seed, **common) for seed in seeds]

    def _run(self, requests: list[Request], params: "list[SamplingParams]", step: int | None) -> "list[RequestOutput]":
        """Return the outputs of vLLM in the order of the requests."""
        from tqdm import tqdm

        engine = self._llm.llm_engine
        order = self._llm.enqueue(requests, params, use_tqdm=False)
        finished: list[RequestOutput] = []
        entered = False
        bar = tqdm(total=len(order), desc="generate", disable=not sys.stderr.isatty(), leave=False)
        with closing(bar), on_failure(lambda error: engine.abort_request(order, internal=True)):
            while engine.has_unfinished_requests():
                for output in engine.step():
                    if output.finished:
                        finished.append(output)
                        bar.update()
                if not entered:
                    fault_point("generate", rank=envs.integer("RANK", 0), step=step)
                    entered = True
        finished.sort(key=lambda output: int(output.request_id))  # vLLM numbers requests in order of arrival
        return finished

    # ---- memory

    async def resume(self, tags: list[str]) -> None:
        """Allocate the memory of ``weights`` or ``kv_cache`` again, if the engine can sleep."""
        self._wake([tag for tag in tags if tag in self._asleep])

    def _wake(self, tags: list[str]) -> None:
        if tags:
            self._llm.wake_up(tags=tags)
            self._asleep.difference_update(tags)

    async def release(self, tags: list[str] | None = None) -> None:
        """Free the engine's memory, if the engine can sleep. vLLM frees all tags at once; on a CPU the cache goes.

        Requests that are under way wait, and compute their keys and values again afterwards.
        """
        if self._caches and self._llm.reset_prefix_cache(reset_running_requests=True):
            patch.free_cache_pages(self._caches)
        if not self._can_sleep or self._asleep == _SLEEP_TAGS:
            return
        if self._asleep and not can_sleep_half_awake(self._asleep):
            self._wake(sorted(self._asleep))
        self._llm.sleep(level=self._sleep_level, mode="keep")
        self._asleep = set(_SLEEP_TAGS)
        if self._sleep_level == 2:
            self._drop_weights()

    # ---- weights

    def begin_update(self) -> None:
        """Open the model for new weights; see ``BaseRollout``."""
        super().begin_update()
        self._weights.begin()

    def load(self, bucket: Bucket) -> None:
        """Load this rank's part of the next tensors in the engine's dtype.

        Raises: RuntimeError naming a tensor that the model lacks.
        """
        self._weights.load(bucket)

    @property
    def pending_bytes(self) -> int:
        """Bytes that vLLM keeps until the rest of their layer arrives."""
        return self._weights.pending_bytes

    def finish_update(self, version: int) -> None:
        """Complete the change, drop cached prefixes and images, and record the version.

        Raises: RuntimeError naming tensors that did not arrive; the engine then rejects requests.
        """
        self._weights.finish()
        self._drop_cached()
        super().finish_update(version)

    def _drop_cached(self) -> None:
        # Requests that are under way compute their keys and values again, with the new weights.
        self._llm.reset_prefix_cache(reset_running_requests=True)
        self._llm.llm_engine.engine_core.reset_encoder_cache()  # drops outputs of the old vision tower
        self._llm.reset_mm_cache()  # images of the last batch, which seldom appear again

    def abort_update(self) -> None:
        """Abort the change; the engine rejects requests until a whole update has succeeded."""
        self._weights.abort()
        super().abort_update()

    def weight_places(self, names: Collection[str]) -> dict[str, Tensor]:
        """Return where the engine holds each tensor of a checkpoint; see ``BaseRollout``."""
        return self._weights.places(names)

    def finish_shared_update(self, version: int) -> None:
        """Drop cached prefixes and images, and record the version."""
        self._drop_cached()
        super().finish_shared_update(version)

    @property
    def is_idle(self) -> bool:
        """Whether the engine has no request."""
        return not self._llm.llm_engine.has_unfinished_requests()

    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return the log-probability of each token of the prompts but their first; see ``BaseRollout``."""
        from vllm import SamplingParams

        params = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False)
        engine = self._llm.llm_engine
        found: dict[str, Any] = {}
        with preserved_random_state():
            requests: list[Any] = [{"prompt_token_ids": list(ids)} for ids in prompts]
            own_ids = self._llm.enqueue(requests, [params] * len(requests), use_tqdm=False)
            numbers = [engine.output_processor.request_states[own_id].external_req_id for own_id in own_ids]
            with on_failure(lambda error: engine.abort_request(own_ids, internal=True)):
                while len(found) < len(numbers):
                    for output in engine.step():
                        if output.finished and output.request_id in numbers:
                            found[output.request_id] = output.prompt_logprobs
                        elif output.finished:
                            self._hand_over(output)
        return [
            [scored[token].logprob for token, scored in zip(ids[1:], found[number][1:], strict=True)]
            for ids, number in zip(prompts, numbers, strict=True)
        ]

    def _hand_over(self, output: "RequestOutput") -> None:
        """Deliver the output of a request that ended in a step for others; a rollout of batches has none."""

    def weights_checksum(self) -> dict[str, int]:
        """Read the engine's parameters back: checkpoint name in vLLM's form -> checksum of this rank's part."""
        return self._weights.checksums()

    def source_checksum(self, name: str, tensor: Tensor) -> tuple[str, Tensor] | None:
        """Return the entry that ``weights_checksum`` must have for a full checkpoint tensor."""
        return self._weights.checksum_of_source(name, tensor)

    def weight_dtype(self, name: str) -> torch.dtype | None:
        """Return the dtype of the parameter that takes a tensor; see ``BaseRollout``."""
        return self._weights.dtype_of(name)


_SLEEP_TAGS = frozenset({"weights", "kv_cache"})


def can_sleep_half_awake(asleep: Collection[str]) -> bool:
    """Whether vLLM frees the rest of an engine that is half awake: since 0.31, if its weights are awake.

    Otherwise it takes such an engine for one that sleeps, and frees nothing.
    """
    return "weights" not in asleep and is_version_ge("vllm", "0.31.0")


def sleep_level(config: "RolloutConfig") -> int:
    """Return vLLM's sleep level: 2 drops the weights, which the next sync brings back; 1 copies them to host memory.

    vLLM Ascend supports level 1 only.
    """
    keeps = config.layered_summon or config.load_format != "dummy" or get_device_name() == "npu"
    return 1 if keeps else 2


@contextmanager
def _shared_memory_named() -> Iterator[None]:
    """Name the engine's shared memory after a number that rank 0 draws for all ranks.

    It is unlinked once all ranks have opened it, so that it disappears with the processes.
    """
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        yield
        return
    collect_sockets()
    if envs.integer("LOCAL_RANK", 0) == 0:
        patch.remove_stale_shared_memory()
    token = [time.time_ns()]
    torch.distributed.broadcast_object_list(token, src=0)
    patch.name_shared_memory(token[0])
    yield
    torch.distributed.barrier()
    patch.unlink_shared_memory(token[0])
