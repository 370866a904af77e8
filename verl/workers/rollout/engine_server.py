"""The base of the servers of all engines: open requests, pause, weight updates, deadlines, and death of the engine."""

import asyncio
import contextlib
import itertools
import os
import time
from abc import abstractmethod
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from verl.base_config import omega_conf_to_dataclass
from verl.errors import ServerError, WrongInput
from verl.utils.faults import fault_point
from verl.utils.numerics.seeding import RequestSeeds
from verl.utils.ray_utils import hide_other_devices
from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.rollout.server import (
    ABORTED,
    GenerationRequest,
    ParamsT,
    RequestForm,
    RolloutServer,
    ServedEngine,
    TokenOutput,
)
from verl.workers.rollout.unread import stays_unread
from verl.workers.rollout.weight_channel import Layout, Meeting, Received

if TYPE_CHECKING:
    from verl.workers.config import HFModelConfig, RolloutConfig

T = TypeVar("T")
EngineT = TypeVar("EngineT", bound=ServedEngine)
PromptT = TypeVar("PromptT")

_POLL_S = 0.001
_LONGEST_PULSE_S = 5.0
_GLANCE_S = 0.5


@dataclass
class OpenRequest:
    """A request that the server has not answered; ``key`` is its id in the engine."""

    key: str
    arrived: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    started: bool = False
    aborted: bool = False
    given_up: asyncio.Event = field(default_factory=asyncio.Event)


class EngineServer(RolloutServer, Generic[EngineT, PromptT, ParamsT]):
    """An engine in separate processes; see ``RolloutServer`` for the contract.

    The server is paused from ``pause`` or ``begin_update`` until ``resume``; requests wait in the server during that
    time. A server that ``waits_for_weights`` of a trainer starts paused. An engine that has died, or has not answered
    for ``server.heartbeat_timeout`` seconds, is ended: every caller that waits gets a ``ServerError``, and so does
    every later one.

    Args: ``name`` is that of the actor; ``replica_rank`` is its number among the servers.
    """

    _is_hybrid = False
    """Whether the engine takes turns with the trainer on its devices."""

    def __init__(
        self,
        name: str,
        replica_rank: int,
        config: "RolloutConfig | Any",
        model_config: "HFModelConfig | Any",
        waits_for_weights: bool = False,
    ) -> None:
        self.name = name
        self.replica_rank = replica_rank
        self.config: RolloutConfig = omega_conf_to_dataclass(config)
        model: HFModelConfig = omega_conf_to_dataclass(model_config)
        if not self._is_hybrid:
            hide_other_devices()
            is_filled = waits_for_weights and stays_unread(self.config, model.hf_config)
            if self.config.load_format == "dummy" and not is_filled:
                self.config.load_format = "auto"
        self.seeds = RequestSeeds(self.config.seed)
        self._engine, self._form = self._start_engine(model)
        self._deadline_s = self.config.server.heartbeat_timeout
        self._serial = itertools.count()
        # Open requests by the caller's id, and then by the engine's id.
        self._open: dict[str, dict[str, OpenRequest]] = {}
        self._version = NO_WEIGHTS
        self._usable = not waits_for_weights
        self._gate = asyncio.Event()
        self._is_paused = waits_for_weights
        if not self._is_paused:
            self._gate.set()
        self._error: ServerError | None = None
        self._is_dead = asyncio.Event()
        self._asked = 0
        self._beginning = asyncio.Lock()
        self._heart: asyncio.Task[None] | None = None
        self._step: int | None = None
        self._is_reborn = False

    # ---- what an engine adds

    @abstractmethod
    def _start_engine(self, model_config: "HFModelConfig") -> tuple[EngineT, RequestForm[PromptT, ParamsT]]:
        """Start the engine, and return it with its request form."""

    @abstractmethod
    async def _ask_engine(self, entry: OpenRequest, prompt: PromptT, params: ParamsT) -> TokenOutput:
        """Let the engine answer a request."""

    def _refusals(self) -> tuple[type[Exception], ...]:
        """Return the exceptions by which the engine refuses a request."""
        return (ValueError,)

    def _deaths(self) -> tuple[type[Exception], ...]:
        """Return the exceptions that the engine raises when it is gone."""
        return ()

    # ---- life and death

    async def ready(self) -> dict[str, Any]:
        """Return where the server runs, and the size of its engine."""
        import ray

        self._check_alive()
        await self._begin()
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "engine_pids": self._engine.pids,
            "engine_workers": self._engine.workers,
        }

    async def _begin(self) -> None:
        """Tell the engine the version of its weights, and start the heartbeat, once.

        A server that Ray has started again may get a request first.
        """
        import ray

        async with self._beginning:
            if self._heart is None:
                await self._ask(self._engine.set_version(self._version), "a version of the weights")
                if self._is_paused:
                    await self._ask(self._engine.pause(), "a pause")
                self._heart = asyncio.get_running_loop().create_task(self._beat())
                self._is_reborn = ray.get_runtime_context().was_current_actor_reconstructed

    async def _beat(self) -> None:
        watch = asyncio.create_task(self._watch())  # notices a death during a call, when no ping is sent
        try:
            while self._error is None:
                if not self._asked:  # an engine that is asked for something has a deadline for it
                    with contextlib.suppress(RuntimeError):  # an answer that is an error is a sign of life too
                        await self._ask(self._engine.ping(), "a sign of life")
                await asyncio.wait({watch}, timeout=min(self._deadline_s / 4, _LONGEST_PULSE_S))
                if watch.done():
                    watch.result()
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        """Return once the engine is found dead, by watching its processes without sending requests."""
        while self._error is None:
            why = self._engine.death()
            if why is not None:
                self._end(why)
            await asyncio.sleep(_GLANCE_S)

    async def _ask(self, call: Awaitable[T], what: str, timeout_s: float | None = None) -> T:
        """Wait for a call of the engine, until a deadline; without one, a call could wait forever if the engine dies.

        Raises: ServerError if the engine is gone or does not answer, which ends it; RuntimeError of the call itself.
        """
        limit = self._deadline_s if timeout_s is None else timeout_s
        self._asked += 1
        task = asyncio.ensure_future(call)
        try:
            if not await self._is_answered(task, limit):
                raise self._end(f"asked for {what}, it has not answered for {limit:g} s")
            try:
                return task.result()
            except self._deaths() as error:
                raise self._end(f"its engine has died: {error!r}") from error
            except Exception as error:  # engines pass on the text of an error in one of their processes
                raise RuntimeError(f"rollout server {self.name}, asked for {what}: {error}") from error
        finally:
            self._asked -= 1
            task.cancel()

    async def _is_answered(self, answer: asyncio.Future[Any], timeout_s: float) -> bool:
        """Wait for an answer of the engine; return whether it came in time.

        Raises: ServerError as soon as the engine is known to be dead.
        """
        dead = asyncio.ensure_future(self._is_dead.wait())
        try:
            await asyncio.wait({answer, dead}, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            dead.cancel()
        if not answer.done():
            self._check_alive()
        return answer.done()

    def _end(self, why: str) -> ServerError:
        """End the engine, and give every caller that waits an error; return that error."""
        if self._error is None:
            self._error = ServerError(f"rollout server {self.name}: {why}")
            self._is_dead.set()
            self._engine.stop()
        return self._error

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

    # ---- requests

    async def answer(self, request: GenerationRequest) -> TokenOutput:
        """Continue a prompt; see ``RolloutServer.answer``."""
        self._check_alive()
        if self._heart is None and not self._is_hybrid:
            await self._begin()
        prompt = self._form.prompt(request)
        if not self._is_paused:  # a paused engine keeps the request waiting, even until it has weights
            self._check_usable()
        params = self._form.params(request)
        request_id = request.request_id
        entry = OpenRequest(f"{request_id}#{next(self._serial)}")
        self._open.setdefault(request_id, {})[entry.key] = entry
        work = asyncio.create_task(self._run(entry, prompt, params))
        tasks = {work, *(asyncio.create_task(event.wait()) for event in (self._is_dead, entry.given_up))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._check_alive()
                return self._form.not_started(params)
            output = work.result()
        except self._refusals() as error:
            raise WrongInput(f"the rollout engine refused request {request_id}: {error}") from error
        except self._deaths() as error:
            raise self._end(f"its engine has died: {error!r}") from error
        finally:
            for task in tasks:
                task.cancel()
            del self._open[request_id][entry.key]
            if not self._open[request_id]:
                del self._open[request_id]
        if output.finish_reason == ABORTED and not entry.aborted:  # vLLM returns this when its process is told to end
            raise self._end("its engine has ended a request that nobody aborted")
        return output

    async def _run(self, entry: OpenRequest, prompt: PromptT, params: ParamsT) -> TokenOutput:
        await self._gate.wait()
        entry.started, entry.started_at = True, time.monotonic()
        self._offer_fault()
        return await self._ask_engine(entry, prompt, params)

    def _offer_fault(self) -> None:
        if not self._is_reborn:  # a restarted server must not fire the fault again
            fault_point("generate", rank=self.replica_rank, step=self._step)

    async def abort(self, request_id: str) -> bool:
        """End the requests of this id: their callers get the tokens so far."""
        entries = list(self._open.get(request_id, {}).values())
        for entry in entries:
            entry.aborted = True
            if not entry.started:
                entry.given_up.set()
        for entry in entries:
            while entry.started and entry.key in self._open.get(request_id, {}):
                if await self._ask(self._engine.abort(entry.key), "the end of a request"):
                    break
                await asyncio.sleep(_POLL_S)  # the engine does not know the request yet
        return bool(entries)

    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Return what the engine does: ``running``, ``waiting``, ``version``, and whether it is ``paused``.

        Raises: ServerError if the engine is gone or does not answer before the deadline.
        """
        self._check_alive()
        answer = asyncio.ensure_future(self._engine.ping())
        try:
            if not await self._is_answered(answer, timeout_s):
                raise ServerError(f"rollout server {self.name} has not answered for {timeout_s:g} s")
            answer.result()
        except self._deaths() as error:
            raise self._end(f"its engine has died: {error!r}") from error
        finally:
            answer.cancel()
        entries = [entry for group in self._open.values() for entry in group.values()]
        running = sum(entry.started for entry in entries)
        return {
            "running": running,
            "waiting": len(entries) - running,
            "version": self._version,
            "paused": float(self._is_paused),
        }

    def _check_usable(self) -> None:
        if not self._usable:
            raise RuntimeError(
                f"rollout server {self.name} holds no usable weights: the last update failed, or none has been "
                "finished yet"
            )

    # ---- pause and weights

    async def pause(self) -> None:
        """Stop between two steps; requests keep what they have and go on after ``resume``."""
        self._check_alive()
        self._gate.clear()
        if not self._is_paused:
            self._is_paused = True
            await self._ask(self._engine.pause(), "a pause")

    async def resume(self) -> None:
        """Go on.

        Raises: RuntimeError without usable weights.
        """
        self._check_alive()
        self._check_usable()
        await self._ask(self._engine.resume(), "an end of the pause")
        self._is_paused = False
        self._gate.set()

    async def version(self) -> int:
        """Return the version of the weights; -1 without weights of a trainer."""
        self._check_alive()
        return self._version

    async def connect(self, meeting: Meeting) -> None:
        """Let the engine's workers join the process group that broadcasts weights; see ``ServedEngine.connect``."""
        await self._ask(self._engine.connect(meeting), "a connection to the trainer", meeting["timeout_s"])

    async def begin_update(self, step: int | None = None) -> None:
        """Pause, and open the model for new weights; ``step`` is the run's step, for messages."""
        self._check_alive()
        self._step = step
        self._usable = False
        self._version = NO_WEIGHTS
        await self.pause()
        await self._ask(self._engine.begin_update(), "the start of an update")

    async def load(self, layout: Layout, path: str | None, timeout_s: float) -> None:
        """Load a bucket from shared memory, or from the group that ``connect`` has joined."""
        self._check_alive()
        await self._ask(self._engine.load(layout, path), "the load of weights", timeout_s)

    async def finish_update(self, version: int, timeout_s: float) -> Received:
        """Complete the update, read the weights back, and drop cached prefixes; the server stays paused.

        Returns the ``checksums`` of the tensors that arrived, on all workers of the engine alike, and how many were
            ``unverified``.
        """
        self._check_alive()
        received = await self._ask(self._engine.finish_update(version), "the end of an update", timeout_s)
        self._version = version
        self._usable = True
        return received

    async def abort_update(self) -> None:
        """Abort the update; the server stays paused until a complete update."""
        self._check_alive()
        self._usable = False
        self._version = NO_WEIGHTS
        await self._ask(self._engine.abort_update(), "the end of an update")

    async def shutdown(self) -> None:
        """End the engine; callers that wait get an error."""
        self._end("it has been stopped")
