"""The worker whose rollout answers single requests."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, register
from verl.utils.profiler.ranges import simple_timer
from verl.workers.roles.accounting import begin_peak
from verl.workers.roles.actor_rollout_ref import ActorRolloutRefWorker
from verl.workers.rollout.server import GenerationRequest, RolloutServer, TokenOutput

if TYPE_CHECKING:
    from verl.single_controller.base.actor import Actor
    from verl.workers.rollout.sglang_rollout import SGLangRollout
    from verl.workers.rollout.vllm_rollout import vLLMAsyncRollout


class AsyncActorRolloutRefWorker(ActorRolloutRefWorker, RolloutServer):
    """Trains and generates as its base does, and serves between ``wake_up`` and ``sleep``; see ``RolloutServer``.

    The workers of an engine wake up and sleep together; requests go to the first of them.
    """

    rollout: "vLLMAsyncRollout | SGLangRollout"

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def wake_up(self, step: int | None = None) -> bool:
        """Give devices and current weights to the engine; collective over the workers. Returns True."""
        if not self._sync_timing:  # otherwise the peak and the seconds began with the sync
            begin_peak()
        self._step = self.rollout.run_step = step
        with simple_timer("wake_and_sync", self._sync_timing):
            await self.rollout_mode()
        return True

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def sleep(self) -> bool:
        """Take the devices back; requests wait until ``wake_up``. Returns True."""
        with simple_timer("sleep", self._sync_timing):
            await self.trainer_mode()
        return True

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def rollout_server(self) -> "Actor | None":
        """Return the actor that answers requests; None if this worker answers, and on workers that do not lead."""
        return getattr(self.rollout, "server", None)

    generate = register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)(RolloutServer.generate)

    async def answer(self, request: GenerationRequest) -> TokenOutput:
        """Continue a prompt; see ``RolloutServer.answer``. A user's rollout might not have ``answer``."""
        return await self.rollout.generate(**request.arguments())

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def abort(self, request_id: str) -> bool:
        """End the requests of this id; see ``RolloutServer.abort``."""
        return await self.rollout.abort(request_id)

    @register(dispatch_mode=Dispatch.DIRECT_ROLLOUT_METHOD)
    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Return the state of the engine; see ``RolloutServer.health``."""
        return await self.rollout.health(timeout_s)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def generation_report(
        self,
        seconds: float,
        lengths: Sequence[int],
        oldest_version: int | None = None,
        planned_version: int | None = None,
    ) -> DataProto:
        """Return timing and metrics since ``wake_up``, as those of ``generate_sequences``.

        Args: the seconds between waking up and sleeping, and the tokens of each sequence of the whole batch;
            ``oldest_version`` is the oldest version of the weights that sampled a token, if it is known, and
            ``planned_version`` the one that was to sample all, if that is not the present one.
        """
        timing = self._sync_timing | {"generate_sequences": seconds}
        self._sync_timing = {}
        config = self.rollout_config
        devices = self.world_size if self._is_rollout else config.nnodes * config.n_gpus_per_node
        figures = self._generation_figures(timing, lengths, num_workers=devices)
        for name, version in (("versions_behind", oldest_version), ("versions_planned", planned_version)):
            if version is not None and self._is_actor:
                figures["metrics"][f"weight_sync/{name}"] = float(self.engine.weights_version - version)
        return DataProto(meta_info=figures)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def trained_version(self) -> int:
        """Return the version of the weights that are trained."""
        return self.engine.weights_version
