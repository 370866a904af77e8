"""Generate responses for a file of prompts by the OpenAI endpoint over standalone rollout servers."""

import asyncio
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import aiohttp

from verl.base_config import omega_conf_to_dataclass
from verl.experimental.agent_loop.endpoint.server import Endpoint, Limits
from verl.experimental.agent_loop.endpoint.session import Policy
from verl.experimental.agent_loop.endpoint.templates import Templates
from verl.experimental.agent_loop.servers import AsyncLLMServerManager
from verl.experimental.agent_loop.tool_parser import get_tool_parser
from verl.single_controller.base.actor import Actor
from verl.single_controller.base.driver_phase import phase
from verl.trainer.generation import Generation
from verl.utils.dataset.vision_utils import Media
from verl.utils.json_types import JsonObject
from verl.utils.numerics.seeding import sampling_seeds
from verl.workers.config import RolloutConfig
from verl.workers.rollout.base import sampling_of
from verl.workers.rollout.standalone import StandaloneServers, replica_class_of

_DAY_S = 86_400.0


class ServerGeneration(Generation):
    """One run of ``main_generation_server``: ``Generation``, whose workers are servers."""

    @contextmanager
    def _workers(self) -> Iterator[Any]:
        """Start the servers and yield their handles; replace those whose engines die, and release all in the end."""
        role = self.config.worker.actor_rollout_ref
        trainer = self.config.trainer
        config: RolloutConfig = omega_conf_to_dataclass(role.rollout)
        config = replace(config, nnodes=trainer.nnodes, n_gpus_per_node=trainer.n_gpus_per_node)
        servers = StandaloneServers(
            replica_class_of(config), config, role.model, trainer.device, waits_for_weights=False
        )
        try:
            with phase("init_model"):
                for replica in servers.replicas:
                    replica.wait_until_ready()
            with servers.watched(None):
                yield list(servers.handles.values())
        finally:
            servers.shutdown()

    def _generate(self, workers: Any, rows: Sequence[int]) -> list[list[str]]:
        """Return the responses of each row; ``workers`` are handles of servers."""
        return asyncio.run(self._asked(workers, rows))

    async def _asked(self, handles: Sequence[Actor], rows: Sequence[int]) -> list[list[str]]:
        token = secrets.token_urlsafe(32)
        policy = Policy(
            server_manager=AsyncLLMServerManager(self.config.worker, handles),
            templates=Templates(self.tokenizer, {}),
            parser=get_tool_parser(self.rollout.multi_turn.format, self.tokenizer),
            model=str(self.model.path),
            prompt_length=self.rollout.prompt_length,
            response_length=self.rollout.response_length,
        )
        endpoint = Endpoint(policy=policy, token=token, limits=Limits(answer_s=_DAY_S))
        await endpoint.start()
        try:
            timeout = aiohttp.ClientTimeout(total=_DAY_S)
            connector = aiohttp.TCPConnector(limit=0)
            headers = {"Authorization": f"Bearer {token}"}
            async with aiohttp.ClientSession(
                endpoint.address, timeout=timeout, connector=connector, headers=headers
            ) as client:
                asked = []
                for row in rows:
                    media, _ = self._shown(row)
                    for body in self._bodies(row):
                        asked.append(self._seen(policy, body, media) if media else _text(client, body))
                texts = await asyncio.gather(*asked)
        finally:
            await endpoint.close()
        samples = self.config.data.n_samples
        return [texts[start : start + samples] for start in range(0, len(texts), samples)]

    async def _seen(self, policy: Policy, body: dict[str, Any], media: Media) -> str:
        """Generate the text that continues a prompt with images or videos, which the endpoint does not support."""
        sampling = {name: value for name, value in body.items() if name not in ("model", "prompt")}
        output = await policy.server_manager.generate(
            secrets.token_hex(), prompt_ids=body["prompt"], sampling_params=sampling, multi_modal_data=media.as_data()
        )
        text: str = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
        return text

    def _bodies(self, row: int) -> Iterator[JsonObject]:
        """Yield the requests of a row: its prompt as tokens, and a seed for each sample."""
        rollout = self.rollout
        samples = self.config.data.n_samples
        greedy = not rollout.do_sample or rollout.temperature == 0
        sampling = sampling_of(rollout, greedy)
        for seed in sampling_seeds(rollout.seed, 0, 1, samples, first_prompt=row).tolist():
            how = sampling if greedy else sampling | {"seed": seed}
            yield {"model": "policy", "prompt": self.prompts[row], "max_tokens": rollout.response_length, **how}


async def _text(client: aiohttp.ClientSession, body: JsonObject) -> str:
    """Return the text that continues a prompt.

    Raises: RuntimeError with the endpoint's message.
    """
    async with client.post("/v1/completions", json=body) as response:
        answer = await response.json()
    if "error" in answer:
        raise RuntimeError(f"the endpoint refused a prompt: {answer['error']['message']}")
    text: str = answer["choices"][0]["text"]
    return text
