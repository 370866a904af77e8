"""Send the requests of agent loops to the rollout servers."""

import asyncio
import copy
import itertools
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Self

from omegaconf import DictConfig, OmegaConf
from ray.exceptions import RayActorError

from verl.errors import RequestAbortedError, RequestTimeoutError, ServerError, WrongInput
from verl.experimental.agent_loop.attempts import Attempt
from verl.experimental.agent_loop.held import Hold, Parts
from verl.single_controller.base.actor import Actor, RemoteMethod
from verl.utils.observe import timeline
from verl.utils.observe.rollout_trace import rollout_trace_op
from verl.workers.config.actor_rollout_ref import is_hybrid
from verl.workers.config.rollout import start_limit_s
from verl.workers.rollout.server import ABORTED, GenerationRequest, SamplingParams, TokenOutput, cause_of
from verl.workers.rollout.server_replica import cause_of_death

logger = logging.getLogger(__name__)

OVERLOAD = 2.0
"""A conversation leaves its server when the server has more than this many times the tokens in flight of the least
loaded one, plus the tokens of the prompt. Below that limit an engine with a larger batch answers nearly as fast, since
it reads its weights once for all requests; and a move computes the whole prompt again.
"""

HEARTBEAT_S = 10.0
"""Pause between two questions whether a server lives, while requests wait for it."""


MOST_LOST = 5
"""Servers that may be lost, one after the other, while they have a request; then it fails."""


@dataclass(eq=False)
class _Server:
    """A server as this process sees it.

    ``gone`` says why it takes no requests at present, ``is_over`` whether its actor has failed for good.
    """

    handle: Actor
    name: str
    tokens: int = 0
    gone: str | None = None
    is_over: bool = False
    waiting: "set[asyncio.Future[TokenOutput]]" = field(default_factory=set)
    watch: "asyncio.Task[None] | None" = None
    generate: RemoteMethod = field(init=False)

    def __post_init__(self) -> None:
        self.generate = without_events(self.handle.generate)

    @property
    def short_name(self) -> str:
        """The name without the id of the actor."""
        return self.name.partition(" (")[0]


class AsyncLLMServerManager:
    """Chooses the server of each request, and finds another one if it dies.

    A new conversation goes to the server with the fewest tokens in flight from this process. Its later turns go to the
    same server, which has its prefix in the cache, unless that server is overloaded (``OVERLOAD``) or gone. A request
    whose server dies is sent to another one. While requests wait, servers are asked for their health; one that has not
    answered for ``rollout.agent.server_timeout_s`` is gone.

    Args: ``server_handles`` are actors with the methods of ``RolloutServer``; ``max_cache_size`` is the number of
        conversations whose server is remembered.
    Attributes: ``held`` interrupts the requests of attempts that train.
    """

    def __init__(self, config: DictConfig, server_handles: Sequence[Actor], max_cache_size: int = 10000) -> None:
        self.config = config
        agent = OmegaConf.select(config, "actor_rollout_ref.rollout.agent") or {}
        self._turn_timeout_s: float | None = agent.get("turn_timeout_s")
        self._server_timeout_s = float(agent.get("server_timeout_s") or 120.0)
        server = OmegaConf.select(config, "actor_rollout_ref.rollout.server")
        device = OmegaConf.select(config, "trainer.device") or "cpu"
        start_s = 0.0 if server is None else start_limit_s(server.get("max_start_wait_time"), device)
        self._return_timeout_s = max(self._server_timeout_s, start_s)
        self._servers: list[_Server] = []
        self.set_servers(server_handles)
        self._server_of: OrderedDict[str, _Server] = OrderedDict()
        self._max_cache_size = max_cache_size
        self._serial = itertools.count()
        self._attempt: Attempt | None = None
        self.held = Hold()

    def of(self, attempt: Attempt) -> Self:
        """Return a manager with the same servers whose requests belong to an attempt."""
        mine = copy.copy(self)
        mine._attempt = attempt
        return mine

    @property
    def server_handles(self) -> list[Actor]:
        """The actors that take requests."""
        return [server.handle for server in self._servers]

    def set_servers(self, server_handles: Sequence[Actor]) -> None:
        """Use these servers from now on; servers that were already in use keep their load."""
        known = {_identity(server.handle): server for server in self._servers}
        count = len(server_handles)
        self._servers[:] = [
            known.get(_identity(handle)) or _Server(handle, f"rollout server {index} of {count}{_actor_of(handle)}")
            for index, handle in enumerate(server_handles)
        ]

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
        """Continue a prompt on one of the servers; see ``RolloutServer.answer``.

        The seed of a row becomes that of the turn. Cancelling the call aborts the request. A request that ``held``
        interrupts goes on when it may, after the tokens that it has.

        Args: ``request_id`` is that of the conversation, the same in each of its turns.
        Raises: WrongInput for a prompt that is no list, ``max_tokens`` below 1, and ``n`` above 1; RequestTimeoutError
            after ``rollout.agent.turn_timeout_s``; ServerError when no server is left; RequestAbortedError for a
            response that a server has cut: it is not what the model would have said.
        """
        if isinstance(prompt_ids, Mapping):  # as apply_chat_template returns by default
            raise WrongInput(
                "prompt_ids is a mapping, not a list of tokens: give apply_chat_template return_dict=False"
            )
        attempt = self._attempt
        conversation = request_id
        params = dict(sampling_params)
        limit = params.get("max_tokens")
        count = params.pop("n", None)
        if limit is not None and limit < 1:  # engines may take 0 for no limit
            raise WrongInput(f"max_tokens={limit}: a response has at least one token: do not ask where none has room")
        if count not in (None, 1):
            raise WrongInput(f"n={count}: a request gets one response: send a request for each")
        if attempt is not None:
            conversation = f"{attempt.id}/{request_id}"
            params = attempt.next_turn(params)
        serial = next(self._serial)
        request = GenerationRequest(prompt_ids, params, f"{conversation}/{serial}", image_data, multi_modal_data)
        is_first = attempt is not None and attempt.turns == 1
        parts = Parts(request)
        if is_first and attempt is not None and attempt.kept is not None:
            parts.outputs += attempt.kept.part(request)
        lost = 0
        while True:
            may_be_held = attempt is not None and attempt.trains
            if may_be_held:
                await self.held.wait()
            server = await self._server_for(conversation, len(prompt_ids))
            if may_be_held and self.held.is_on:
                continue
            if attempt is not None:
                attempt.servers.append(server.name)
            request = parts.rest()
            try:
                with timeline.grouped(attempt.id if attempt is not None else ""):
                    output, is_interrupted = await self._interruptible(server, request, may_be_held)
            except (ServerError, RayActorError) as error:
                self._take_out(server, _loss_of(error))
                lost += 1
                if lost == MOST_LOST:  # the request itself may crash the servers: do not try another one
                    raise ServerError(
                        f"request {request.request_id} of {len(prompt_ids)} tokens: {lost} rollout servers were "
                        f"lost while they had it, at last {server.name}: {server.gone}"
                    ) from error
                continue
            parts.outputs.append(output)
            if output.finish_reason == ABORTED and not is_interrupted:
                raise RequestAbortedError(
                    f"request {request.request_id}: {server.name} aborted it after {len(output.token_ids)} "
                    "tokens, and no agent loop has given it up"
                )
            if is_interrupted and is_first and attempt is not None:
                self.held.keep(attempt.uid, attempt.sample, parts)
            if output.finish_reason != ABORTED or parts.is_full:
                output = parts.joined()
                if attempt is not None:
                    attempt.sampled_by(output.versions)
                return output

    # ---- one request

    async def _interruptible(
        self, server: _Server, request: GenerationRequest, may_be_held: bool
    ) -> tuple[TokenOutput, bool]:
        """Ask a server; return its answer, and whether ``held`` has interrupted the request."""
        if not may_be_held:
            return await self._timed(server, request), False
        self.held.sent(request, lambda: _abort(server, request.request_id))
        is_interrupted = False
        try:
            output = await self._timed(server, request)
        finally:
            is_interrupted = self.held.answered(request)
        return output, is_interrupted

    async def _timed(self, server: _Server, request: GenerationRequest) -> TokenOutput:
        """Ask a server, and record when and for how long."""
        name = server.short_name
        prompt_tokens = len(request.prompt_ids)
        with timeline.span("generate", "turn", request=request.request_id, prompt_tokens=prompt_tokens) as shown:
            # Measured within the turn, so that the request lies within it however long this process is interrupted.
            begin = time.monotonic()
            output = await self._ask(server, request)
            timeline.add_request(name, begin, output.queue_s, output.sample_s, request=request.request_id)
            shown.update(tokens=len(output.token_ids), cached=output.num_cached_tokens, end=output.finish_reason)
            shown.update(server=name, queue_s=output.queue_s, sample_s=output.sample_s)
        return output

    async def _ask(self, server: _Server, request: GenerationRequest) -> TokenOutput:
        size = len(request.prompt_ids) + int(request.sampling_params.get("max_tokens") or 0)
        answer = asyncio.ensure_future(server.generate.remote(**request.arguments()))
        is_answered = False
        server.tokens += size
        server.waiting.add(answer)
        if server.watch is None or server.watch.done():
            server.watch = asyncio.create_task(self._watch(server))
        try:
            done, _ = await asyncio.wait({answer}, timeout=self._turn_timeout_s)
            if not done:
                raise RequestTimeoutError(
                    f"request {request.request_id}: {server.name} has not answered within "
                    f"rollout.agent.turn_timeout_s={self._turn_timeout_s:g}"
                )
            if answer.cancelled():  # _take_out has cancelled the request
                raise ServerError(server.gone or f"{server.name} cancelled the request")
            is_answered = True
            output: TokenOutput = answer.result()
            return output
        finally:
            server.tokens -= size
            server.waiting.discard(answer)
            if not is_answered:  # a slow server would otherwise go on with the request
                answer.cancel()
                _abort(server, request.request_id)
            if not server.waiting and server.watch is not None:
                server.watch.cancel()
                server.watch = None

    async def _watch(self, server: _Server) -> None:
        """Ask a server for its health while requests wait for it."""
        while True:
            await asyncio.sleep(min(HEARTBEAT_S, self._server_timeout_s / 2))
            reason = await _illness(server, self._server_timeout_s)
            if reason is not None:
                self._take_out(server, reason)
                return

    # ---- which server

    def _choose_server(self, request_id: str, prompt_tokens: int = 0) -> _Server | None:
        """Return the server of a conversation; None if none is left."""
        alive = [server for server in self._servers if server.gone is None]
        if not alive:
            return None
        first = os.getpid() % len(alive)  # so that the workers do not all begin with the same one
        least = min(alive[first:] + alive[:first], key=lambda server: server.tokens)
        known = self._server_of.pop(request_id, None)
        if known is None or known not in alive or known.tokens > OVERLOAD * least.tokens + prompt_tokens:
            known = least
        self._server_of[request_id] = known
        if len(self._server_of) > self._max_cache_size:
            self._server_of.popitem(last=False)
        return known

    async def _server_for(self, conversation: str, prompt_tokens: int) -> _Server:
        """Return the server of a conversation; wait for standalone servers to restart, since the trainer's never do.

        Raises: ServerError when no server is left.
        """
        server = self._choose_server(conversation, prompt_tokens)
        until = asyncio.get_running_loop().time() + (0 if is_hybrid(self.config) else self._return_timeout_s)
        while server is None:
            is_over = any(each.is_over for each in self._servers)
            if is_over or asyncio.get_running_loop().time() >= until:
                reasons = "; ".join(f"{each.name}: {each.gone}" for each in self._servers)
                raise ServerError(f"no rollout server is left: {reasons}")
            await asyncio.sleep(1.0)
            await self.revive()
            server = self._choose_server(conversation, prompt_tokens)
        return server

    def _take_out(self, server: _Server, reason: str) -> None:
        """Send no more requests to a server; its waiting requests go to other servers."""
        if server.gone is None:
            logger.warning("%s is gone, its requests go to the others: %s", server.name, reason)
        server.gone = server.gone or reason
        for answer in list(server.waiting):
            answer.cancel()

    async def revive(self) -> None:
        """Use lost servers again that answer now."""
        gone = [server for server in self._servers if server.gone is not None]
        answers = await asyncio.gather(*(_illness(server, HEARTBEAT_S) for server in gone))
        for server, illness in zip(gone, answers, strict=True):
            if illness is None and hasattr(server.handle, "health"):
                logger.warning("%s is back", server.name)
                server.gone = None
            elif server.is_over:
                server.gone = illness


def _loss_of(error: Exception) -> str:
    """Return why a server is gone, with the reason in the first line."""
    if isinstance(error, RayActorError) and error.actor_init_failed:
        return f"it has died and cannot start again: {cause_of_death(error)}"
    if isinstance(error, RayActorError):
        return f"its process has died: {error}"
    cause = cause_of(error)
    return f"{type(cause).__name__}: {cause}"


async def _illness(server: _Server, limit_s: float) -> str | None:
    """Return why a server cannot be used; None if it answers before the deadline, or has no ``health``."""
    if not hasattr(server.handle, "health"):
        return None
    try:
        async with asyncio.timeout(limit_s + 1):
            await server.handle.health.remote(timeout_s=limit_s)
    except TimeoutError:
        return f"{server.name} has not answered for rollout.agent.server_timeout_s={limit_s:g}"
    except Exception as error:  # a user's server may raise anything; a server that cannot report its health is not used
        server.is_over = isinstance(error, RayActorError) and error.actor_init_failed
        return _loss_of(error)
    return None


def _abort(server: _Server, request_id: str) -> None:
    """End a request for which nobody waits; a hanging server gets the message once it continues."""
    if hasattr(server.handle, "abort"):
        task = asyncio.create_task(_aborted(server, request_id))
        _ABORTS.add(task)
        task.add_done_callback(_ABORTS.discard)


async def _aborted(server: _Server, request_id: str) -> None:
    with suppress(Exception):  # the server may be gone, and with it the request
        await server.handle.abort.remote(request_id)


_ABORTS: "set[asyncio.Task[None]]" = set()  # the event loop holds weak references only


def without_events(method: RemoteMethod) -> RemoteMethod:
    """Return the method of an actor such that Ray keeps no records of its calls.

    Otherwise Ray's state service would keep about 4 kB for each of the last 100,000 calls, and every process would
    report its calls once a second.
    """
    if not hasattr(method, "options"):  # a server might not be a Ray actor
        return method
    return method.options(enable_task_events=False)


def _identity(handle: Actor) -> str | int:
    """Return a key that is equal for two handles of one Ray actor."""
    actor_id = getattr(handle, "_actor_id", None)
    return id(handle) if actor_id is None else str(actor_id.hex())


def _actor_of(handle: Actor) -> str:
    identity = _identity(handle)
    return f" (actor {identity})" if isinstance(identity, str) else ""
