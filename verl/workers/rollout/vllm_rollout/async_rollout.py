"""A vLLM engine in the process of the worker that answers single requests, in any order and from any event loop."""

import asyncio
import itertools
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from verl.errors import ServerError, WrongInput
from verl.protocol import DataProto
from verl.utils import envs
from verl.utils.faults import fault_point
from verl.workers.config.engines import ENGINES
from verl.workers.rollout.engine_group import engine_group
from verl.workers.rollout.server import GenerationRequest, RolloutServer, TokenOutput
from verl.workers.rollout.vllm_rollout.engine_loop import Ended, EngineLoop, NotStartedError
from verl.workers.rollout.vllm_rollout.requests import VLLMRequestForm, refusals, token_output
from verl.workers.rollout.vllm_rollout.vllm_rollout import vLLMRollout

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from vllm import RequestOutput

    from verl.workers.config import HFModelConfig, RolloutConfig


class vLLMAsyncRollout(vLLMRollout, RolloutServer):
    """The engine of ``vLLMRollout``, stepped by a thread; see ``RolloutServer`` for the contract.

    Rank 0 of a tensor-parallel group takes the requests. The engine is paused from ``release`` or ``begin_update`` on
    until ``resume(["kv_cache"])``.
    """

    facts = ENGINES["vllm"]._replace(modes=("async",))

    def __init__(
        self, config: "RolloutConfig", model_config: "HFModelConfig", device_mesh: "DeviceMesh | None" = None
    ) -> None:
        super().__init__(config, model_config, device_mesh)
        self.run_step: int | None = None  # step of the trainer, for messages
        self._serial = itertools.count()
        self._changed_at = time.monotonic()  # time of the last weight change; a later request uses only these weights
        self._keys: dict[str, set[str]] = {}  # keys of the open requests by the id that the caller gave
        engine = self._llm.model_config
        self._form = VLLMRequestForm(
            config, model_config, engine.max_model_len, engine.get_vocab_size(), lambda: int(self.seeds.draw(1))
        )
        self._llm.llm_engine.set_weight_version(str(self.weights_version))
        self._loop = EngineLoop(self._llm, engine_group(config.tensor_model_parallel_size), self._offer_fault)

    def shutdown(self) -> None:
        """End thread and engine, and all process groups of this process, including the trainer's."""
        self._loop.stop()
        super().shutdown()

    def _offer_fault(self) -> None:
        fault_point("generate", rank=envs.integer("RANK", 0), step=self.run_step)

    # ---- requests

    async def answer(self, request: GenerationRequest) -> TokenOutput:
        """Continue a prompt; see ``RolloutServer.answer``."""
        prompt = self._form.prompt(request)
        if not self._loop.is_paused:  # a paused engine keeps the request waiting, even until it has weights
            self._check_usable()
        params = self._form.params(request)
        request_id = request.request_id
        waiting = asyncio.get_running_loop()
        answer: asyncio.Future[Ended | BaseException] = waiting.create_future()
        key = f"{request_id}#{next(self._serial)}"
        arrived = time.monotonic()
        self._keys.setdefault(request_id, set()).add(key)
        try:
            self._loop.submit(key, prompt, params, _deliver_to(waiting, answer))
            output = await answer
        except asyncio.CancelledError:
            self._loop.abort(key)
            raise
        finally:
            self._keys[request_id].discard(key)
            if not self._keys[request_id]:
                del self._keys[request_id]
        if isinstance(output, NotStartedError):
            return self._form.not_started(params)
        if isinstance(output, refusals()):
            raise WrongInput(f"vLLM refused request {request_id}: {output}") from output
        if isinstance(output, BaseException):
            raise output
        version = self.weights_version if output.started >= self._changed_at else None
        return token_output(output.output, prompt, params, arrived, output.started, version)

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

    # ---- a whole batch, as ``vLLMRollout`` takes it

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response for each prompt; single requests wait during the call."""
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
        self._changed_to(version)

    def begin_shared_update(self) -> None:
        """Pause the engine: the trainer has changed the weights in place."""
        self._loop.pause()
        super().begin_shared_update()

    def finish_shared_update(self, version: int) -> None:
        """Drop cached prefixes, and record the version; see ``vLLMRollout``."""
        super().finish_shared_update(version)
        self._changed_to(version)

    def _changed_to(self, version: int) -> None:
        self._llm.llm_engine.set_weight_version(str(version))
        self._changed_at = time.monotonic()

    def prompt_log_probs(self, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Return log-probabilities of prompts, computed on the thread of the engine; see ``BaseRollout``.

        Requests that are under way take part in its steps, and one may end in them.
        """
        return self._loop.call(lambda: super(vLLMAsyncRollout, self).prompt_log_probs(prompts))

    def _hand_over(self, output: "RequestOutput") -> None:
        self._loop.deliver(output)


def _deliver_to(
    waiting: asyncio.AbstractEventLoop, answer: "asyncio.Future[Ended | BaseException]"
) -> "Callable[[Ended | BaseException], None]":
    """Return a function for other threads that gives a value to a future, unless its caller has gone."""

    def settle(value: "Ended | BaseException") -> None:
        if not answer.done():
            answer.set_result(value)

    def deliver(value: "Ended | BaseException") -> None:
        if not waiting.is_closed():
            waiting.call_soon_threadsafe(settle, value)

    return deliver
