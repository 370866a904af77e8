"""The agent loop of a separate agent program, which gets a base URL and a key, and may return a reward."""

import asyncio
import inspect
import json
import logging
import math
from abc import abstractmethod
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from omegaconf import DictConfig, OmegaConf

from verl.errors import NoTurnError, WrongInput
from verl.experimental.agent_loop.attempts import Sampling
from verl.experimental.agent_loop.base import AgentLoopBase, AgentLoopOutput
from verl.experimental.agent_loop.endpoint.requests import MOST_MESSAGES, MOST_STOPS, MOST_TOOLS
from verl.experimental.agent_loop.endpoint.server import MOST_BODY_BYTES, Endpoint, Limits
from verl.experimental.agent_loop.endpoint.session import CLIENT_SAMPLING, Policy, Session
from verl.experimental.agent_loop.endpoint.templates import ENCODE_TIMEOUT_S, MOST_CACHE_BYTES, Templates
from verl.experimental.agent_loop.tool_parser import get_tool_parser
from verl.experimental.agent_loop.trajectory import TURNS_COLUMN, turn_columns
from verl.utils.concurrency import in_thread
from verl.utils.json_types import JsonObject

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

EVERYWHERE = ("0.0.0.0", "::")


@lru_cache(maxsize=1)
def warn_of_unseen_media() -> None:
    """Warn once that the model sees no images; a program may use the images of its row in other ways."""
    logger.warning(
        "rows hold images or videos, and the endpoint takes none: the model does not see them, unless your agent "
        "describes them in words"
    )


class EndpointAgentLoop(AgentLoopBase):
    """Lets a program act through the OpenAI API; a subclass implements ``act``.

    Args:
        host: where the endpoint of this process listens; ``0.0.0.0`` lets agents on other machines in, by their keys.
        client_sampling: what to do with a sampling parameter, such as temperature, that differs from the run's:
            ``refuse`` the request, ``ignore`` the value, or ``apply`` it, which trains on tokens as if the run had
            sampled them.
        answer_timeout_s: the most seconds of a request.
        most_body_mb, most_messages, most_tools, most_stops: the most megabytes, messages, tools and stop texts of a
            request.
        most_cache_mb: the most megabytes of the descriptions of tools that the process keeps.
        encode_timeout_s: the most seconds to write the texts of a request as tokens.
    """

    def __init__(
        self,
        *args: Any,
        host: str = "127.0.0.1",
        client_sampling: str = "refuse",
        answer_timeout_s: float = 3600.0,
        most_body_mb: float = MOST_BODY_BYTES / 2**20,
        most_messages: int = MOST_MESSAGES,
        most_tools: int = MOST_TOOLS,
        most_stops: int = MOST_STOPS,
        most_cache_mb: float = MOST_CACHE_BYTES / 2**20,
        encode_timeout_s: float = ENCODE_TIMEOUT_S,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        if client_sampling not in CLIENT_SAMPLING:
            raise WrongInput(f"client_sampling={client_sampling!r}: must be one of {', '.join(CLIENT_SAMPLING)}")
        self._host = host
        self._limits = Limits(
            body_bytes=int(most_body_mb * 2**20),
            answer_s=answer_timeout_s,
            messages=most_messages,
            tools=most_tools,
            stops=most_stops,
        )
        node = self.config.actor_rollout_ref
        self._policy = Policy(
            server_manager=self.server_manager,
            templates=_templates(self.tokenizer, _options(self.config), int(most_cache_mb * 2**20), encode_timeout_s),
            parser=get_tool_parser(node.rollout.multi_turn.format, self.tokenizer),
            model=str(node.model.path),
            prompt_length=node.rollout.prompt_length,
            response_length=node.rollout.response_length,
            client_sampling=client_sampling,
            keep_history=not node.rollout.multi_turn.use_inference_chat_template,
            engine_stops=not node.rollout.skip_tokenizer_init,
        )

    @abstractmethod
    async def act(self, base_url: str, api_key: str, row: JsonObject) -> float | None:
        """Let the agent work on a row; its requests to the endpoint become the trajectory.

        A plain ``def act`` is called in a thread. An ``async def`` must not block: the endpoint answers on its event
        loop.

        Args:
            base_url, api_key: what a client of the ``openai`` package takes; any name of a model will do.
            row: the columns of the row that are no tensors, such as ``raw_prompt`` or ``extra_info``.
        Returns: the score; None leaves it to the reward function of the run.
        """

    async def run(self, sampling_params: Sampling, **kwargs: Any) -> AgentLoopOutput | list[AgentLoopOutput]:
        """Serve a trajectory while the agent works, and return it; a list of its segments if it has several.

        Raises: NoTurnError if the model has said nothing; ServerError if the servers failed the agent.
        """
        if kwargs.get("multi_modal_data"):
            warn_of_unseen_media()
        session = Session(self._policy, sampling_params)
        async with _leased(self._host, self._limits) as endpoint:
            with endpoint.opened(session) as access:
                reward = await self._acted(session, access.base_url, access.api_key, kwargs)
        segments = session.segments
        if not segments:
            reason = f"{session.refused}" if session.refused else "it asked the endpoint for nothing"
            raise NoTurnError(f"{type(self).__name__}.act has ended without an answer of the model: {reason}")
        num_turns = 1 + sum(len(segment.trajectory.turns) for segment in segments)
        outputs = []
        for segment in segments:
            extra = {"segments": len(segments), TURNS_COLUMN: turn_columns(segment.trajectory.turns)}
            outputs.append(segment.trajectory.output(num_turns=num_turns, extra_fields=extra))
        outputs[-1].reward_score = reward  # the reward of the whole trajectory
        return outputs if len(outputs) > 1 else outputs[0]

    async def _acted(self, session: Session, base_url: str, api_key: str, row: JsonObject) -> float | None:
        try:
            act: Callable[..., Any] = self.act
            if inspect.iscoroutinefunction(act):
                reward = await act(base_url, api_key, row)
            else:
                reward = await in_thread(lambda: act(base_url, api_key, row))
        except Exception:  # an agent program may raise anything
            if session.fault is not None:
                raise session.fault from None
            if session.is_full and session.segments:
                return None
            raise
        if session.fault is not None:
            raise session.fault
        if reward is None:
            return None
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise WrongInput(f"{type(self).__name__}.act returned {reward!r}: return a finite number, or None")
        return float(reward)


def _options(config: DictConfig) -> str:
    """Return the arguments of the chat template as JSON."""
    options = config.data.get("apply_chat_template_kwargs") or {}
    return json.dumps(OmegaConf.to_container(options, resolve=True) if OmegaConf.is_config(options) else dict(options))


@lru_cache(maxsize=4)
def _templates(tokenizer: "PreTrainedTokenizerBase", options: str, cache_bytes: int, encode_s: float) -> Templates:
    """Return the chat formats of this process, so that all trajectories share their checks."""
    return Templates(tokenizer, json.loads(options), cache_bytes, encode_s)


@dataclass
class _Lease:
    """An endpoint that serves as long as somebody uses it."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    endpoint: Endpoint | None = None
    users: int = 0


_leases: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[str, Limits], _Lease]] = WeakKeyDictionary()


@asynccontextmanager
async def _leased(host: str, limits: Limits) -> AsyncIterator[Endpoint]:
    """Give the endpoint of this event loop; the first user starts it, the last one closes it."""
    lease = _leases.setdefault(asyncio.get_running_loop(), {}).setdefault((host, limits), _Lease())
    async with lease.lock:
        if lease.endpoint is None:
            endpoint = Endpoint(host, advertised=_node_address() if host in EVERYWHERE else None, limits=limits)
            await endpoint.start()
            lease.endpoint = endpoint
        endpoint = lease.endpoint
        lease.users += 1
    try:
        yield endpoint
    finally:
        lease.users -= 1
        if not lease.users:
            async with lease.lock:
                if not lease.users and lease.endpoint is not None:
                    endpoint = lease.endpoint
                    lease.endpoint = None
                    await endpoint.close()


def _node_address() -> str:
    """Return the address by which other nodes reach this one."""
    import ray

    return str(ray.util.get_node_ip_address())
