"""vLLM's asynchronous engine, as the server that owns it sees it."""

import contextlib
import signal
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import psutil

from verl.workers.rollout.weight_channel import Layout, Meeting, Received, common_dtypes

if TYPE_CHECKING:
    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

    from verl.workers.rollout.vllm_rollout.media import Request


class VLLMEngine:
    """vLLM's engine in separate processes; see ``ServedEngine``."""

    def __init__(self, llm: "AsyncLLM") -> None:
        self._llm: Any = llm
        parallel = llm.vllm_config.parallel_config
        self.workers: int = parallel.world_size * parallel.data_parallel_size
        self.context_length: int = llm.model_config.max_model_len
        self.vocab_size: int = llm.model_config.get_vocab_size()

    # ---- life

    @property
    def pids(self) -> list[int]:
        """The processes of the engine."""
        return [process.pid for process in _children()]

    def death(self) -> str | None:
        """Return why the engine is gone; None while it lives. Calls that wait for it do not notice its death."""
        return "its engine has died" if self._llm.errored else None

    def stop(self) -> None:
        """End all processes of the engine."""
        for process in _children():
            with contextlib.suppress(psutil.Error):
                process.send_signal(signal.SIGKILL)

    async def ping(self) -> None:
        """Wait for an answer of the process that steps."""
        await self._llm.get_weight_version()

    # ---- requests

    def generate(self, request: "Request", params: "SamplingParams", key: str) -> "AsyncIterator[RequestOutput]":
        """Yield the output of a request."""
        return self._llm.generate(request, params, key)

    async def abort(self, key: str) -> bool:
        """End a request; return whether the engine has it."""
        if key not in self._llm.output_processor.external_req_ids:
            return False
        await self._llm.abort(key)
        return True

    async def pause(self) -> None:
        """Stop between two steps, and keep all requests."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on."""
        await self._llm.resume_generation()

    # ---- weights

    async def set_version(self, version: int) -> None:
        """Set the version of the weights that the engine has loaded by itself."""
        await self._llm.update_weight_version(str(version))

    async def connect(self, meeting: Meeting) -> None:
        """Join the process group that broadcasts weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(dict(meeting)))

    async def begin_update(self) -> None:
        """Open the model for new weights."""
        await self._llm.start_weight_update()

    async def load(self, layout: Layout, path: str | None) -> None:
        """Load a bucket from shared memory, or from the group."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.update_weights(WeightTransferUpdateRequest({"layout": layout, "path": path}))

    async def finish_update(self, version: int) -> Received:
        """Complete the update, read the weights back, and drop cached prefixes and images.

        Raises: RuntimeError if the workers got different weights.
        """
        await self._llm.finish_weight_update(weight_version=str(version))
        # Requests that are under way compute their keys and values again, with the new weights.
        await self._llm.reset_prefix_cache(reset_running_requests=True)
        await self._llm.reset_encoder_cache()  # drops outputs of the old vision tower
        await self._llm.reset_mm_cache()
        # AsyncLLM.collective_rpc returns what the workers of the first data-parallel engine say, and no others.
        asked = self._llm.engine_core.call_utility_all_async("collective_rpc", "verl_received", None, (), None)
        received: list[Received] = [each for workers in await asked for each in workers]
        if any(other["checksums"] != received[0]["checksums"] for other in received[1:]):
            raise RuntimeError("the workers of its engine got different weights")
        return received[0] | {"dtypes": common_dtypes(each["dtypes"] for each in received)}

    async def abort_update(self) -> None:
        """Drop the tensors received so far."""
        await self._llm.collective_rpc("verl_abort_update")


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)
