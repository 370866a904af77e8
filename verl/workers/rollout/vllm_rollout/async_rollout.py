"""A vLLM engine in the process of the worker that answers single requests, in any order and from any event loop."""

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch

from verl.base_config import WrongInput
from verl.protocol import DataProto
from verl.utils import envs
from verl.utils.faults import fault_point
from verl.workers.rollout.base import eos_token_ids
from verl.workers.rollout.server import SamplingParams, ServerError, TokenOutput
from verl.workers.rollout.vllm_rollout.engine_loop import EngineLoop, NotStartedError
from verl.workers.rollout.vllm_rollout.media import Request
from verl.workers.rollout.vllm_rollout.vllm_rollout import flat_log_probs, vLLMRollout

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh
    from vllm import RequestOutput

    from verl.workers.config import HFModelConfig, RolloutConfig

_FOR_EVER = timedelta(days=365)  # between steps the other ranks wait for the leader, all through training


class vLLMAsyncRollout(vLLMRollout):
    """The engine of ``vLLMRollout``, stepped by a thread; see ``RolloutServer`` for the contract.

    Rank 0 of a tensor-parallel group takes the requests. The engine is paused from ``release`` or ``begin_update`` on
    until ``resume(["kv_cache"])``.
    """

    def __init__(
        self, config: "RolloutConfig", model_config: "HFModelConfig", device_mesh: "DeviceMesh | None" = None
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.run_step: int | None = None  # of the trainer, for messages
        self._end_token_ids = [] if config.ignore_eos else eos_token_ids(model_config.eos_token_id)
        self._serial = itertools.count()
        self._keys: dict[str, set[str]] = {}  # keys of the open requests by the id that the caller gave
        self._llm.llm_engine.set_weight_version(str(self.weights_version))
        self._loop = EngineLoop(self._llm, _engine_group(config), self._offer_fault)

    def shutdown(self) -> None:
        """End thread and engine, and all process groups of this process, including the trainer's."""
        self._loop.stop()
        super().shutdown()

    def _offer_fault(self) -> None:
        fault_point("generate", rank=envs.integer("RANK", 0), step=self.run_step)

    # ---- requests

    async def generate(
        self,
        prompt_ids: Sequence[int],
        sampling_params: SamplingParams,
        request_id: str,
        image_data: Sequence[Any] | None = None,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> TokenOutput:
        """Continue a prompt; see ``RolloutServer.generate``.

        ``image_data`` is the established form of ``multi_modal_data={"image": ...}``.

        Raises: RuntimeError without usable weights; ValueError for a prompt that leaves no room for a token.
        """
        request: Request = {"prompt_token_ids": self._checked_prompt(prompt_ids, request_id)}
        media = dict(multi_modal_data or {}) | ({"image": list(image_data)} if image_data else {})
        if media:
            request["multi_modal_data"] = media
        if media.get("video"):  # the data set has chosen the frames
            request["mm_processor_kwargs"] = {"do_sample_frames": False}
        params = self._request_params(sampling_params, len(prompt_ids))
        waiting = asyncio.get_running_loop()
        answer: asyncio.Future[RequestOutput | BaseException] = waiting.create_future()
        key = f"{request_id}#{next(self._serial)}"
        self._keys.setdefault(request_id, set()).add(key)
        try:
            self._loop.submit(key, request, params, _deliver_to(waiting, answer))
            output = await answer
        except asyncio.CancelledError:
            self._loop.abort(key)
            raise
        finally:
            self._keys[request_id].discard(key)
            if not self._keys[request_id]:
                del self._keys[request_id]
        if isinstance(output, NotStartedError):
            return TokenOutput([], [] if params.logprobs is not None else None, "abort")
        if isinstance(output, refusals()):
            raise WrongInput(f"request {request_id}: {output}") from output
        if isinstance(output, BaseException):
            raise output
        found = _token_output(output, params.logprobs is not None)
        if media:
            found.expanded_prompt_ids = list(output.prompt_token_ids or [])
        return found

    async def abort(self, request_id: str) -> bool:
        """End the requests of this id: their callers get the tokens so far."""
        keys = self._keys.get(request_id, set())
        for key in keys:
            self._loop.abort(key)
        return bool(keys)

    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Return what the engine does; see ``RolloutServer.health``."""
        waiting = asyncio.get_running_loop()
        answered = asyncio.Event()
        self._loop.ask(lambda: waiting.call_soon_threadsafe(answered.set))
        try:
            await asyncio.wait_for(answered.wait(), timeout_s)
        except TimeoutError:
            raise ServerError(f"the rollout engine has not answered for {timeout_s:g} s: a step hangs") from None
        running, held = self._loop.load
        return {"steps": self._loop.steps, "running": running, "waiting": held, "version": self.weights_version}

    def _checked_prompt(self, prompt_ids: Sequence[int], request_id: str) -> list[int]:
        """Return the prompt as a list; vLLM takes unknown tokens for zeros."""
        ids = list(prompt_ids)
        size = self._llm.model_config.get_vocab_size()
        if not ids:
            raise WrongInput(f"request {request_id}: the prompt is empty: send at least one token")
        if min(ids) < 0 or max(ids) >= size:
            wrong = next(token for token in ids if not 0 <= token < size)
            raise WrongInput(f"request {request_id}: the prompt has token {wrong}; the model's are 0 to {size - 1}")
        return ids

    def _request_params(self, given: SamplingParams, prompt_length: int) -> Any:
        """Return vLLM's parameters of a request.

        Raises: WrongInput for an option that the engine does not have or cannot serve.
        """
        from vllm import SamplingParams as EngineParams
        from vllm.sampling_params import RequestOutputKind

        if not self._loop.is_paused:  # else the request waits, if need be for weights
            self._check_usable()
        room = self._llm.model_config.max_model_len - prompt_length
        if room < 1:
            raise WrongInput(
                f"the prompt has {prompt_length} tokens and the engine's context {prompt_length + room}: lower the "
                "length of the prompt, or raise actor_rollout_ref.rollout.max_model_len"
            )
        values: dict[str, Any] = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "repetition_penalty": 1.0, **given}
        if values.get("stop") and self.config.skip_tokenizer_init:
            raise WrongInput(
                f"stop={values['stop']!r}: the engine needs its tokenizer for stop strings: set "
                "actor_rollout_ref.rollout.skip_tokenizer_init=false, or send stop_token_ids"
            )
        wanted = values.pop("logprobs", None)
        ends = self._end_token_ids + list(values.pop("stop_token_ids", None) or [])
        values["max_tokens"] = min(room, values.get("max_tokens") or room)
        values["top_k"] = max(0, int(values["top_k"]))
        if values["temperature"] and values.get("seed") is None:
            values["seed"] = int(self.seeds.draw(1))
        fixed: dict[str, Any] = {
            "n": 1,
            "ignore_eos": True,  # the model's folder must not name the end tokens
            "stop_token_ids": ends,
            "detokenize": bool(values.get("stop")),
            "logprobs": 0 if wanted or (wanted is None and self.config.calculate_log_probs) else None,
            "flat_logprobs": True,
            "skip_clone": True,
            "output_kind": RequestOutputKind.FINAL_ONLY,
        }
        try:
            return EngineParams(**values | fixed)
        except refusals() as error:
            raise WrongInput(f"sampling parameters {dict(given)}: {error}") from error

    # ---- a whole batch, as ``vLLMRollout`` takes it

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response for each prompt; single requests wait meanwhile."""
        was_paused = self._loop.is_paused
        self._loop.pause()
        try:
            return super().generate_sequences(prompts)
        finally:
            if not was_paused:
                self._loop.resume()

    # ---- memory and weights

    async def resume(self, tags: list[str]) -> None:
        """Allocate the memory of ``weights`` or ``kv_cache`` again; with the cache the engine runs again."""
        await super().resume(tags)
        if "kv_cache" in tags:
            self._loop.resume()

    async def release(self, tags: list[str] | None = None) -> None:
        """Pause the engine, and free its memory if it can sleep."""
        self._loop.pause()
        await super().release(tags)

    def begin_update(self) -> None:
        """Pause the engine, and open the model for new weights."""
        self._loop.pause()
        super().begin_update()

    def finish_update(self, version: int) -> None:
        """Complete the change, drop cached prefixes and record the version; see ``vLLMRollout``."""
        super().finish_update(version)
        self._llm.llm_engine.set_weight_version(str(version))


def refusals() -> tuple[type[Exception], ...]:
    """Return what vLLM raises for a request that it refuses."""
    from vllm import exceptions

    return TypeError, ValueError, exceptions.VLLMClientError


def _engine_group(config: "RolloutConfig") -> "ProcessGroup | None":
    """Return a group of the ranks that share this rank's engine; collective over all ranks."""
    size = config.tensor_model_parallel_size
    if size == 1:
        return None
    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    mine = None
    for first in range(0, world, size):
        ranks = list(range(first, first + size))
        group = torch.distributed.new_group(ranks, timeout=_FOR_EVER, backend="gloo")
        if rank in ranks:
            mine = group
    return mine


def _deliver_to(
    waiting: asyncio.AbstractEventLoop, answer: "asyncio.Future[RequestOutput | BaseException]"
) -> "Callable[[RequestOutput | BaseException], None]":
    """Return a function for other threads that gives a value to a future, unless its caller has gone."""

    def settle(value: "RequestOutput | BaseException") -> None:
        if not answer.done():
            answer.set_result(value)

    def deliver(value: "RequestOutput | BaseException") -> None:
        if not waiting.is_closed():
            waiting.call_soon_threadsafe(settle, value)

    return deliver


def _token_output(output: "RequestOutput", with_log_probs: bool) -> TokenOutput:
    sample = output.outputs[0]
    spans = sample.weight_versions or []
    return TokenOutput(
        token_ids=list(sample.token_ids),
        log_probs=flat_log_probs(sample) if with_log_probs else None,
        finish_reason=sample.finish_reason,
        versions=[(int(span.version), span.end - span.start) for span in spans],
        num_cached_tokens=output.num_cached_tokens or 0,
    )
