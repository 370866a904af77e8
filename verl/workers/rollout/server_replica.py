"""Rollout servers by replica: where an engine runs, which workers hold it, and how requests reach it."""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.errors import MissingName, ServerError, UnsupportedInput, WrongInput
from verl.single_controller.base.actor import Actor
from verl.single_controller.ray.resource_pool import Bundle, RayResourcePool
from verl.utils import envs
from verl.utils.device import get_device_name
from verl.workers.config.rollout import start_limit_s

if TYPE_CHECKING:
    from verl.single_controller.ray import RayWorkerGroup
    from verl.workers.config import HFModelConfig, RolloutConfig

logger = logging.getLogger(__name__)


def cause_of_death(error: ray.exceptions.RayActorError) -> str:
    """Return Ray's reason for the death of an actor; if it failed to start, the exception without its trace."""
    text = str(error)
    if not error.actor_init_failed:
        return text
    trace = text.rpartition("ray::")[2].splitlines()[1:]
    return "\n".join(itertools.dropwhile(lambda line: line.startswith(" "), trace)) or text


class RolloutMode(Enum):
    """Where the engine of a replica runs."""

    HYBRID = "hybrid"
    """In the processes of the trainer: training and generation take turns."""
    COLOCATED = "colocated"
    """On the devices of the trainer, in separate processes."""
    STANDALONE = "standalone"
    """On its own devices."""


class ServerPool(RayResourcePool):
    """The devices of one server, which is one process with all of them."""

    def __init__(self, name: str, devices: int, use_gpu: bool) -> None:
        super().__init__([1], use_gpu=use_gpu, max_colocate_count=1, name_prefix=name)
        self._devices = devices

    def bundle(self, device_name: str = "cuda") -> Bundle:
        """Return the resources of the server."""
        return {name: amount * self._devices for name, amount in super().bundle(device_name).items()}


class RolloutReplica(ABC):
    """One engine, which tensor parallelism may spread over several workers.

    A standalone replica is a Ray actor with the methods of ``RolloutServer``. Ray starts the actor again if its process
    ends, and ``restart`` ends it, so ``server_handle`` stays the same. Callers see a death as ``ServerError`` (the
    engine has ended) or as Ray's ``RayActorError`` (the actor has ended, or does not run yet).

    Args:
        replica_rank: number of this replica.
        gpus_per_node: devices of a node.

    Attributes: ``device_name`` is the kind of the devices, at first of those of this process. ``server_class`` is the
        class of standalone servers, which a subclass may set; its constructor takes the arguments of ``vLLMServer``.
    """

    server_class: type

    def __init__(
        self,
        replica_rank: int,
        config: "RolloutConfig",
        model_config: "HFModelConfig | Any",
        gpus_per_node: int = 8,
    ) -> None:
        self.replica_rank = replica_rank
        self.config = config
        self.model_config = model_config
        self.gpus_per_node = gpus_per_node
        self.device_name = get_device_name()
        self.world_size = config.workers_per_engine * config.pipeline_model_parallel_size
        self.rollout_mode: RolloutMode | None = None
        self.workers: list[Actor] = []
        self.resource_pool: ServerPool | None = None
        self.waits_for_weights = False
        self._server_handle: Actor | None = None
        self._server_name = ""
        self._pid: int | None = None
        self._ended_pid: int | None = None
        self._may_end_until = 0.0

    def init_hybrid(self, worker_group: "RayWorkerGroup") -> None:
        """Take this replica's workers from the trainer's workers, and let them serve."""
        first = self.replica_rank * self.world_size
        self.workers = list(worker_group.workers[first : first + self.world_size])
        self.rollout_mode = RolloutMode.HYBRID
        self.launch_servers()

    def init_standalone(self, waits_for_weights: bool = False) -> None:
        """Start a server in the background on separate devices, the pool ``rollout_pool_<rank>``.

        Args: with ``waits_for_weights`` it does not serve before it has the weights of a trainer.
        Raises: WrongInput for an engine that is larger than a node; PlacementError if the devices are not there.
        """
        if self.world_size > self.gpus_per_node:
            raise WrongInput(
                f"a standalone engine of {self.world_size} devices (tensor_model_parallel_size x data_parallel_size) "
                f"does not fit a node of {self.gpus_per_node}: lower one of them"
            )
        self.rollout_mode = RolloutMode.STANDALONE
        self.waits_for_weights = waits_for_weights
        on_cpu = self.device_name == "cpu"
        self.resource_pool = ServerPool(f"rollout_pool_{self.replica_rank}", self.world_size, use_gpu=not on_cpu)
        self.resource_pool.get_placement_groups(device_name=self.device_name)
        self.launch_servers()

    def init_colocated(self, resource_pool: RayResourcePool) -> None:
        """Refuse: an engine shares the trainer's devices in the trainer's processes.

        Raises: UnsupportedInput.
        """
        raise UnsupportedInput(
            "rollout servers in separate processes do not share the devices of another pool: call init_hybrid "
            "(actor_rollout_ref.hybrid_engine=true) or init_standalone (actor_rollout_ref.hybrid_engine=false)"
        )

    @property
    def server_address(self) -> str:
        """Refuse: a server answers calls of its actor, and one endpoint speaks HTTP for all servers.

        Raises: MissingName.
        """
        raise MissingName(
            "rollout servers have no server_address: call server_handle.generate.remote(...); for the OpenAI API over "
            "HTTP derive an agent loop from EndpointAgentLoop, or use verl.trainer.main_generation_server"
        )

    @abstractmethod
    def launch_servers(self) -> None:
        """Make ``server_handle`` answer requests."""

    def engine_started(self) -> None:
        """Note that the workers have started their engine, which may have another ``server_handle`` than before."""
        return

    def start_server(self, name: str) -> Actor:
        """Start the actor of a standalone server in its pool."""
        assert self.resource_pool is not None
        bundle = self.resource_pool.bundle(self.device_name)
        (group,) = self.resource_pool.get_placement_groups(device_name=self.device_name)
        options: dict[str, Any] = {
            "name": name,
            "num_cpus": bundle.pop("CPU"),
            "num_gpus": bundle.pop("GPU", 0),
            "resources": bundle,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(group, 0),
            "max_restarts": -1,
            "max_concurrency": MOST_CALLS,
        }
        if self.device_name == "cpu":  # else Ray gives a process as many threads as it has cores
            options["runtime_env"] = {"env_vars": {"OMP_NUM_THREADS": envs.read("OMP_NUM_THREADS", "1")}}
        self._server_name = name
        actor_class: Any = ray.remote(self.server_class)
        return actor_class.options(**options).remote(
            name, self.replica_rank, self.config, self.model_config, self.waits_for_weights
        )

    @property
    def server_handle(self) -> Actor:
        """The Ray actor that has the methods of ``RolloutServer``."""
        if self._server_handle is None:
            raise RuntimeError(f"replica {self.replica_rank} does not serve yet: call init_hybrid or init_standalone")
        return self._server_handle

    @property
    def server_name(self) -> str:
        """The name of the actor of a standalone server."""
        return self._server_name

    def wait_until_ready(self) -> dict[str, Any]:
        """Wait until a standalone server has started, or has started again, and return what its ``ready`` returns.

        Raises: ServerError naming the server if it has not started within ``server.max_start_wait_time`` seconds.
        """
        limit_s = start_limit_s(self.config.server.max_start_wait_time, self.device_name)
        began = time.monotonic()
        deadline = began + limit_s
        died_at: float | None = None
        while True:
            try:
                left_s = max(0.1, deadline - time.monotonic())
                place = ray.get(self.server_handle.ready.remote(), timeout=min(left_s, _TELL_S))
                if place["pid"] != self._ended_pid or time.monotonic() > self._may_end_until:
                    self._pid = place["pid"]
                    return dict(place)
            except ServerError:  # maybe of the process that ``restart`` ends
                if time.monotonic() > self._may_end_until:
                    raise
            except ray.exceptions.ActorUnavailableError:  # Ray is about to start it again
                if time.monotonic() > deadline:
                    raise self._not_started(limit_s) from None
            except ray.exceptions.GetTimeoutError:
                waited_s = time.monotonic() - began
                if waited_s >= limit_s:
                    raise self._not_started(limit_s) from None
                logger.info(
                    "rollout server %s has been starting for %.0f s, of at most %g s",
                    self.server_name,
                    waited_s,
                    limit_s,
                )
            except ray.exceptions.RayActorError as error:  # a call right after ``restart`` may meet the ended process
                now = time.monotonic()
                died_at = died_at or now
                if error.actor_init_failed or now > min(deadline, died_at + _RESTART_S):
                    raise ServerError(
                        f"rollout server {self.server_name} has died while it started: {cause_of_death(error)}"
                    ) from error
            time.sleep(_POLL_S)

    def _not_started(self, limit_s: float) -> ServerError:
        return ServerError(f"rollout server {self.server_name} has not started within {limit_s:g} s")

    def restart(self) -> None:
        """End a standalone server, whatever its state; Ray starts it again, under the same handle.

        The server's open requests fail. If it ``waits_for_weights``, it serves again after a weight update.
        """
        self._ended_pid, self._may_end_until = self._pid, time.monotonic() + _RESTART_S
        # ray.kill returns before the process has ended.
        ray.kill(self.server_handle, no_restart=False)  # type: ignore[arg-type]  # a handle, see `Actor`

    def shutdown(self) -> None:
        """End a standalone server, and give its devices back."""
        if self.rollout_mode is RolloutMode.STANDALONE and self._server_handle is not None:
            ray.kill(self._server_handle, no_restart=True)  # type: ignore[arg-type]  # a handle, see `Actor`
            assert self.resource_pool is not None
            self.resource_pool.release()

    async def wake_up(self, step: int | None = None) -> None:
        """Give devices and current weights to the engine; a standalone engine already has them."""
        await asyncio.gather(*(worker.wake_up.remote(step) for worker in self.workers))

    async def sleep(self) -> None:
        """Give the devices back to the trainer; a standalone engine keeps its own."""
        await asyncio.gather(*(worker.sleep.remote() for worker in self.workers))


MOST_CALLS = 100_000
_POLL_S = 0.2
_TELL_S = 60.0
"""The time between two log lines about a server that is still starting."""
_RESTART_S = 30.0
"""How long Ray may take, on a busy machine, to hear that it has ended an actor."""
