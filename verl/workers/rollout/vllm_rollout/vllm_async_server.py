"""vLLM on resources of its own: the actor that serves, and the replicas of both placements."""

import asyncio
import contextlib
import itertools
import os
import signal
import time
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import psutil

from verl.base_config import WrongInput, omega_conf_to_dataclass
from verl.utils import envs
from verl.utils.faults import fault_point
from verl.utils.numerics.seeding import RequestSeeds
from verl.utils.vllm import import_vllm
from verl.workers.rollout.base import NO_WEIGHTS
from verl.workers.rollout.replica import RolloutReplica
from verl.workers.rollout.server import ABORTED, SamplingParams, ServerError, TokenOutput
from verl.workers.rollout.vllm_rollout.engine_args import INVARIANT_VARIABLE, build_engine_args, is_batch_invariant
from verl.workers.rollout.vllm_rollout.media import Request
from verl.workers.rollout.vllm_rollout.requests import RequestForm, not_started, refusals, token_output
from verl.workers.rollout.weight_channel import Layout

if TYPE_CHECKING:
    from vllm import RequestOutput
    from vllm import SamplingParams as EngineParams

    from verl.workers.config import HFModelConfig, RolloutConfig

T = TypeVar("T")

_POLL_S = 0.001


@dataclass
class _Open:
    """A request that the server has not answered; ``key`` is its id in the engine."""

    key: str
    arrived: float = field(default_factory=time.monotonic)
    started_at: float = 0.0
    started: bool = False
    aborted: bool = False
    given_up: asyncio.Event = field(default_factory=asyncio.Event)


class vLLMServer:
    """A vLLM engine in processes of its own; see ``RolloutServer`` for the contract.

    It is paused from ``pause`` or ``begin_update`` on until ``resume``; then requests wait here. A server that
    ``waits_for_weights`` of a trainer starts paused. An engine that has died, or has not answered for
    ``server.heartbeat_timeout`` seconds, is ended: every caller that waits gets a ``ServerError``, and so does every
    later one.

    Args: ``name`` is that of the actor; ``replica_rank`` is its number among the servers.
    """

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
        if self.config.load_format == "dummy":
            self.config.load_format = "auto"
        model: HFModelConfig = omega_conf_to_dataclass(model_config)
        self.seeds = RequestSeeds(self.config.seed)
        self._engine = self._start_engine(model)
        engine = self._engine.model_config
        self._form = RequestForm(
            self.config, model, engine.max_model_len, engine.get_vocab_size(), lambda: int(self.seeds.draw(1))
        )
        self._deadline_s = self.config.server.heartbeat_timeout
        self._serial = itertools.count()
        self._open: dict[str, dict[str, _Open]] = {}  # by the id that the caller gave, and by the engine's
        self._version = NO_WEIGHTS
        self._usable = not waits_for_weights
        self._gate = asyncio.Event()
        self._is_paused = waits_for_weights
        if not self._is_paused:
            self._gate.set()
        self._error: ServerError | None = None
        self._is_dead = asyncio.Event()
        self._asked = 0
        self._heart: asyncio.Task[None] | None = None
        self._step: int | None = None
        self._is_reborn = False

    def _start_engine(self, model_config: "HFModelConfig") -> Any:
        invariant = is_batch_invariant(self.config)
        import_vllm(batch_invariant=invariant)
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        envs.write({INVARIANT_VARIABLE: str(int(invariant))})
        args = build_engine_args(self.config, model_config, standalone=True)
        return AsyncLLM.from_engine_args(AsyncEngineArgs(**args))

    # ---- life and death

    async def ready(self) -> dict[str, Any]:
        """Return where the server runs, and the size of its engine; the first call starts the heartbeat."""
        import ray

        self._check_alive()
        if self._heart is None:
            await self._ask(self._engine.update_weight_version(str(self._version)), "a version of the weights")
            if self._is_paused:
                await self._ask(self._engine.pause_generation(mode="keep", clear_cache=False), "a pause")
            self._begin_heartbeat()
            self._is_reborn = ray.get_runtime_context().was_current_actor_reconstructed
        parallel = self._engine.vllm_config.parallel_config
        context = ray.get_runtime_context()
        return {
            "node": context.get_node_id(),
            "host": ray.util.get_node_ip_address(),
            "pid": os.getpid(),
            "engine_pids": [process.pid for process in _children()],
            "engine_workers": parallel.world_size * parallel.data_parallel_size,
        }

    def _begin_heartbeat(self) -> None:
        if self._heart is None:
            self._heart = asyncio.get_running_loop().create_task(self._beat())

    async def _beat(self) -> None:
        while self._error is None:
            if not self._asked:  # an engine that is asked for something has a deadline for it
                with contextlib.suppress(ServerError):
                    await self._ask(self._engine.get_weight_version(), "a sign of life")
            await asyncio.sleep(min(self._deadline_s / 4, 5.0))

    async def _ask(self, call: Awaitable[T], what: str, timeout_s: float | None = None) -> T:
        """Wait for a call of the engine, until a deadline; vLLM's calls wait for ever if the engine dies meanwhile.

        Raises: ServerError if the engine is gone or does not answer, which ends it; RuntimeError of the call itself.
        """
        limit = self._deadline_s if timeout_s is None else timeout_s
        self._asked += 1
        task = asyncio.ensure_future(call)
        dead = asyncio.ensure_future(self._is_dead.wait())
        try:
            await asyncio.wait({task, dead}, timeout=limit, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                self._check_alive()
                raise self._end(f"asked for {what}, it has not answered for {limit:g} s")
            try:
                return task.result()
            except _engine_deaths() as error:
                raise self._end(f"its engine has died: {error!r}") from error
            except Exception as error:  # vLLM hands on the text of an error of its engine
                raise RuntimeError(f"rollout server {self.name}, asked for {what}: {error}") from error
        finally:
            self._asked -= 1
            dead.cancel()
            task.cancel()

    def _end(self, why: str) -> ServerError:
        """End the engine, and give every caller that waits an error; return that error."""
        if self._error is None:
            self._error = ServerError(f"rollout server {self.name}: {why}")
            self._is_dead.set()
            for process in _children():
                with contextlib.suppress(psutil.Error):
                    process.send_signal(signal.SIGKILL)
        return self._error

    def _check_alive(self) -> None:
        if self._error is not None:
            raise self._error

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

        Raises: RuntimeError without usable weights; ValueError for a prompt that leaves no room for a token;
            ServerError if the engine is gone.
        """
        self._check_alive()
        request = self._form.request(prompt_ids, request_id, image_data, multi_modal_data)
        if not self._is_paused:  # else the request waits, if need be for weights
            self._check_usable()
        params = self._form.params(sampling_params, len(prompt_ids))
        entry = _Open(f"{request_id}#{next(self._serial)}")
        self._open.setdefault(request_id, {})[entry.key] = entry
        work = asyncio.create_task(self._run(entry, request, params))
        tasks = {work, *(asyncio.create_task(event.wait()) for event in (self._is_dead, entry.given_up))}
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self._check_alive()
                return not_started(params)
            output = work.result()
        except refusals() as error:
            raise WrongInput(f"request {request_id}: {error}") from error
        except _engine_deaths() as error:
            raise self._end(f"its engine has died: {error!r}") from error
        finally:
            for task in tasks:
                task.cancel()
            del self._open[request_id][entry.key]
            if not self._open[request_id]:
                del self._open[request_id]
        if output.outputs[0].finish_reason == ABORTED and not entry.aborted:  # as vLLM answers when it is told to end
            raise self._end("its engine has ended a request that nobody aborted")
        return token_output(output, request, params, entry.arrived, entry.started_at)

    async def _run(self, entry: _Open, request: Request, params: "EngineParams") -> "RequestOutput":
        await self._gate.wait()
        entry.started, entry.started_at = True, time.monotonic()
        if not self._is_reborn:  # a fault fires once
            fault_point("generate", rank=self.replica_rank, step=self._step)
        last = None
        async for output in self._engine.generate(request, params, entry.key):
            last = output
        assert last is not None
        return last

    async def abort(self, request_id: str) -> bool:
        """End the requests of this id: their callers get the tokens so far."""
        entries = list(self._open.get(request_id, {}).values())
        for entry in entries:
            entry.aborted = True
            if not entry.started:
                entry.given_up.set()
        known = self._engine.output_processor.external_req_ids
        for entry in entries:
            while entry.started and entry.key in self._open.get(request_id, {}):
                if entry.key in known:
                    await self._ask(self._engine.abort(entry.key), "the end of a request")
                    break
                await asyncio.sleep(_POLL_S)  # it is on its way to the engine
        return bool(entries)

    async def health(self, timeout_s: float = 10.0) -> dict[str, float]:
        """Return what the engine does: ``running``, ``waiting``, ``version``, and whether it is ``paused``.

        Raises: ServerError if the engine is gone or does not answer before the deadline.
        """
        self._check_alive()
        try:
            await asyncio.wait_for(self._engine.get_weight_version(), timeout_s)
        except TimeoutError:
            self._check_alive()
            raise ServerError(f"rollout server {self.name} has not answered for {timeout_s:g} s") from None
        except _engine_deaths() as error:
            raise self._end(f"its engine has died: {error!r}") from error
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
            await self._ask(self._engine.pause_generation(mode="keep", clear_cache=False), "a pause")

    async def resume(self) -> None:
        """Go on.

        Raises: RuntimeError without usable weights.
        """
        self._check_alive()
        self._check_usable()
        await self._ask(self._engine.resume_generation(), "an end of the pause")
        self._is_paused = False
        self._gate.set()

    async def version(self) -> int:
        """Return the version of the weights; -1 for none of a trainer."""
        self._check_alive()
        return self._version

    async def connect(self, meeting: dict[str, Any]) -> None:
        """Let the engine's workers join the group of ``Rendezvous`` fields in which weights come."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        call = self._engine.init_weight_transfer_engine(WeightTransferInitRequest(meeting))
        await self._ask(call, "a connection to the trainer", meeting["timeout_s"])

    async def begin_update(self, step: int | None = None) -> None:
        """Pause, and open the model for new weights; ``step`` is that of the run, for messages."""
        self._check_alive()
        self._step = step
        self._usable, self._version = False, NO_WEIGHTS
        await self.pause()
        await self._ask(self._engine.start_weight_update(), "the start of an update")

    async def load(self, layout: Layout, path: str | None, timeout_s: float) -> None:
        """Load a bucket from shared memory, or from the group that ``connect`` has joined."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        self._check_alive()
        request = WeightTransferUpdateRequest({"layout": layout, "path": path})
        await self._ask(self._engine.update_weights(request), "the load of weights", timeout_s)

    async def finish_update(self, version: int, timeout_s: float) -> dict[str, Any]:
        """Complete the update, read the weights back, and drop cached prefixes; the server stays paused.

        Returns the ``checksums`` of the tensors that arrived, on all workers of the engine alike, and how many were
            ``unverified``.
        """
        self._check_alive()
        engine = self._engine
        await self._ask(engine.finish_weight_update(weight_version=str(version)), "the end of an update", timeout_s)
        # Requests that are under way compute their keys and values again, with the new weights.
        await self._ask(engine.reset_prefix_cache(reset_running_requests=True), "an empty cache")
        await self._ask(engine.reset_encoder_cache(), "an empty cache")  # outputs of the old vision tower
        await self._ask(engine.reset_mm_cache(), "an empty cache")
        # AsyncLLM.collective_rpc returns what the workers of the first data-parallel engine say, and no others.
        asked = engine.engine_core.call_utility_all_async("collective_rpc", "verl_received", None, (), None)
        received = [each for workers in await self._ask(asked, "checksums", timeout_s) for each in workers]
        if any(other["checksums"] != received[0]["checksums"] for other in received[1:]):
            raise RuntimeError(f"rollout server {self.name}: the workers of its engine got different weights")
        self._version, self._usable = version, True
        return dict(received[0])

    async def abort_update(self) -> None:
        """Abort the update; the server stays paused, and needs a whole one."""
        self._check_alive()
        self._usable, self._version = False, NO_WEIGHTS
        await self._ask(self._engine.collective_rpc("verl_abort_update"), "the end of an update")

    async def shutdown(self) -> None:
        """End the engine; callers that wait get an error."""
        self._end("it has been stopped")


def _children() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _engine_deaths() -> tuple[type[Exception], ...]:
    """Return what vLLM raises when the process of its engine is gone."""
    from vllm.v1.engine import exceptions

    return (exceptions.EngineDeadError,)


class vLLMReplica(RolloutReplica):
    """An engine in the processes of the trainer, whose first worker takes the requests, or a server of its own."""

    server_class: type = vLLMServer

    def launch_servers(self) -> None:
        """Let the first worker serve, which has the engine in its process; a standalone replica starts an actor."""
        if self.workers:
            self._server_handle = self.workers[0]
        else:
            self._server_handle = self.start_server(f"vllm_server_{self.replica_rank}_0")
