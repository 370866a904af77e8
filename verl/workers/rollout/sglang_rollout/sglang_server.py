"""The actor that owns an SGLang engine, and the replicas of both placements."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.utils import envs
from verl.utils.net_utils import get_free_port
from verl.utils.vision.multi_modal import SharedRow, resolve
from verl.workers.rollout.engine_server import EngineServer, OpenRequest
from verl.workers.rollout.engine_settings import is_batch_invariant
from verl.workers.rollout.server import GenerationRequest, SamplingParams, TokenOutput
from verl.workers.rollout.server_replica import RolloutReplica
from verl.workers.rollout.sglang_rollout.engine_args import LONGER_CONTEXT, build_engine_args

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig
    from verl.workers.rollout.sglang_rollout.engine import SGLangEngine
    from verl.workers.rollout.sglang_rollout.requests import EngineParams, SGLangRequestForm, Unexpanded


class SGLangServer(EngineServer["SGLangEngine", "Unexpanded", "EngineParams"]):
    """An SGLang engine in separate processes; see ``EngineServer``."""

    _form: "SGLangRequestForm"

    def _start_engine(self, model_config: "HFModelConfig") -> "tuple[SGLangEngine, SGLangRequestForm]":
        envs.write_default(LONGER_CONTEXT)
        args = build_engine_args(self.config, model_config, self._is_hybrid)
        from verl.workers.rollout.sglang_rollout.engine import SGLangEngine
        from verl.workers.rollout.sglang_rollout.media import media_form
        from verl.workers.rollout.sglang_rollout.requests import SGLangRequestForm

        media = media_form(self.config, model_config)
        if self.config.data_parallel_size == 1:  # otherwise each group of schedulers takes its own port
            args = {"nccl_port": get_free_port()} | args
        engine = SGLangEngine(args, is_batch_invariant(self.config))
        seeds = self.seeds
        context_length = self.config.context_length
        form = SGLangRequestForm(
            self.config, model_config, context_length, engine.vocab_size, lambda: int(seeds.draw(1)), media
        )
        return engine, form

    def _deaths(self) -> tuple[type[Exception], ...]:
        from verl.workers.rollout.sglang_rollout.engine import StoppedError

        return (StoppedError,)

    async def _ask_engine(self, entry: OpenRequest, prompt: "Unexpanded", params: "EngineParams") -> TokenOutput:
        from verl.workers.rollout.sglang_rollout.requests import token_output

        form = self._form
        whole = await asyncio.to_thread(form.expanded, prompt) if prompt.media else form.expanded(prompt)
        values = form.fitted(params, len(whole.token_ids))
        try:
            result = await self._engine.generate(
                whole.token_ids, values, entry.key, return_logprob=params.log_probs, media=whole.media
            )
        except asyncio.CancelledError:
            await asyncio.shield(self._engine.abort(entry.key))
            raise
        return token_output(result, whole, params, entry.arrived, entry.started_at)


class HybridSGLangServer(SGLangServer):
    """The engine of a group of the trainer's workers, on their devices; the first of them started this actor.

    With ``rollout.mode=sync`` the workers generate whole batches; with ``async`` agent loops ask this actor.
    """

    _is_hybrid = True

    def _offer_fault(self) -> None:
        if self.config.serves:  # otherwise the worker answers
            super()._offer_fault()

    async def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        params: Sequence[SamplingParams],
        batch_id: str,
        media: Sequence[SharedRow | Mapping[str, Any] | None] | None = None,
    ) -> list[TokenOutput]:
        """Continue several prompts; an error of one ends all.

        Args: ``media`` are the ``multi_modal_data`` of the prompts, or handles to them.
        Raises: as ``answer``.
        """
        shown: Sequence[Any] = [None] * len(prompts)
        if media is not None:
            shown = await asyncio.to_thread(resolve, media)  # resolve waits for Ray
        tasks = [
            asyncio.create_task(self.answer(GenerationRequest(ids, given, f"{batch_id}/{row}", multi_modal_data=data)))
            for row, (ids, given, data) in enumerate(zip(prompts, params, shown, strict=True))
        ]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def set_step(self, step: int | None) -> None:
        """Set the step of the run, for messages."""
        self._step = step

    async def release(self, tags: list[str]) -> None:
        """Free the memory of ``weights`` or ``kv_cache``; the server is paused."""
        await self._ask(self._engine.release(tags), "a release of memory")

    async def resume_memory(self, tags: list[str]) -> None:
        """Allocate the memory of ``weights`` or ``kv_cache`` again."""
        await self._ask(self._engine.resume_memory(tags), "memory")

    async def load_handles(self, payloads: list[str], timeout_s: float) -> None:
        """Load a bucket from the devices of the workers: one serialized bucket for each of the engine's workers."""
        self._check_alive()
        await self._ask(self._engine.load_handles(payloads), "the load of weights", timeout_s)


class SGLangReplica(RolloutReplica):
    """An engine that the trainer's workers have started on their devices, or a standalone server."""

    server_class: type = SGLangServer

    def launch_servers(self) -> None:
        """Let the first worker pass requests on until the engine has started; a standalone replica starts an actor."""
        if self.workers:
            self._server_handle = self.workers[0]
        else:
            self._server_handle = self.start_server(f"sglang_server_{self.replica_rank}_0")

    def engine_started(self) -> None:
        """Send requests to the actor that owns the engine."""
        import ray

        if self.workers:
            self._server_handle = ray.get(self.workers[0].rollout_server.remote())
