"""The way from agent loops to the rollout servers."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from verl.utils.observe.rollout_trace import rollout_trace_op
from verl.workers.rollout.server import SamplingParams, TokenOutput

Actor = Any  # Ray's actor handles have no static type


class AsyncLLMServerManager:
    """Chooses the server of each request.

    A new conversation goes to the server with the fewest tokens in flight from here. Its later turns go to the same
    server, which has its prefix in the cache.

    Args: ``server_handles`` are actors with the methods of ``RolloutServer``; ``max_cache_size`` is the number of
        conversations whose server is remembered.
    """

    def __init__(self, config: DictConfig, server_handles: Sequence[Actor], max_cache_size: int = 10000) -> None:
        self.config = config
        self.server_handles = list(server_handles)
        self._tokens = [0] * len(self.server_handles)  # in flight, by server
        self._server_of: OrderedDict[str, int] = OrderedDict()
        self._max_cache_size = max_cache_size

    def _choose_server(self, request_id: str) -> int:
        known = self._server_of.pop(request_id, None)
        if known is None:
            known = min(range(len(self._tokens)), key=self._tokens.__getitem__)
        self._server_of[request_id] = known
        if len(self._server_of) > self._max_cache_size:
            self._server_of.popitem(last=False)
        return known

    @rollout_trace_op
    async def generate(
        self,
        request_id: str,
        *,
        prompt_ids: list[int],
        sampling_params: SamplingParams,
        image_data: Sequence[Any] | None = None,
        multi_modal_data: Mapping[str, Any] | None = None,
    ) -> TokenOutput:
        """Continue a prompt on one of the servers; see ``RolloutServer.generate``.

        ``request_id`` is that of the conversation, the same in each of its turns.
        """
        server = self._choose_server(request_id)
        size = len(prompt_ids) + int(sampling_params.get("max_tokens") or 0)
        self._tokens[server] += size
        try:
            output: TokenOutput = await self.server_handles[server].generate.remote(
                prompt_ids=prompt_ids,
                sampling_params=dict(sampling_params),
                request_id=request_id,
                image_data=image_data,
                multi_modal_data=multi_modal_data,
            )
        finally:
            self._tokens[server] -= size
        return output
