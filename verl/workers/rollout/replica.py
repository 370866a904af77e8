"""Rollout servers by replica: where an engine runs, which workers hold it, and how requests reach it."""

import asyncio
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

from verl.workers.rollout.server import TokenOutput as TokenOutput

if TYPE_CHECKING:
    from verl.single_controller.ray import RayWorkerGroup
    from verl.workers.config import HFModelConfig, RolloutConfig

Actor = Any  # Ray's actor handles have no static type


class RolloutMode(Enum):
    """Where the engine of a replica runs."""

    HYBRID = "hybrid"
    """In the processes of the trainer, which take turns with it."""
    COLOCATED = "colocated"
    """On the devices of the trainer, in processes of its own."""
    STANDALONE = "standalone"
    """On devices of its own."""


class UnknownReplicaError(ValueError, AssertionError):
    """No class of replicas has this name."""


class RolloutReplica(ABC):
    """One engine, which tensor parallelism may spread over several workers.

    Args:
        replica_rank: number of this replica.
        gpus_per_node: devices of a node.
    """

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
        self.world_size = config.workers_per_engine * config.pipeline_model_parallel_size
        self.rollout_mode: RolloutMode | None = None
        self.workers: list[Actor] = []
        self._server_handle: Actor = None

    def init_hybrid(self, worker_group: "RayWorkerGroup") -> None:
        """Take this replica's workers from those of the trainer, and let them serve."""
        first = self.replica_rank * self.world_size
        self.workers = list(worker_group.workers[first : first + self.world_size])
        self.rollout_mode = RolloutMode.HYBRID
        self.launch_servers()

    @abstractmethod
    def launch_servers(self) -> None:
        """Make ``server_handle`` answer requests."""

    @property
    def server_handle(self) -> Actor:
        """The Ray actor that has the methods of ``RolloutServer``."""
        if self._server_handle is None:
            raise RuntimeError(f"replica {self.replica_rank} does not serve yet: call init_hybrid")
        return self._server_handle

    async def wake_up(self, step: int | None = None) -> None:
        """Give devices and current weights to the engine."""
        await asyncio.gather(*(worker.wake_up.remote(step) for worker in self.workers))

    async def sleep(self) -> None:
        """Give the devices back to the trainer."""
        await asyncio.gather(*(worker.sleep.remote() for worker in self.workers))


class RolloutReplicaRegistry:
    """The classes of replicas by the name of their engine."""

    _loaders: dict[str, Callable[[], type[RolloutReplica]]] = {}

    @classmethod
    def register(cls, name: str, loader: Callable[[], type[RolloutReplica]]) -> None:
        """Let ``loader`` import the class of an engine; a later one replaces it."""
        cls._loaders[name] = loader

    @classmethod
    def get(cls, name: str) -> type[RolloutReplica]:
        """Import the class of an engine.

        Raises: ValueError, which is also an AssertionError, for an unknown name.
        """
        if name not in cls._loaders:
            raise UnknownReplicaError(
                f"actor_rollout_ref.rollout.name={name!r} has no servers: write one of {sorted(cls._loaders)}, or "
                "rollout.mode=sync"
            )
        return cls._loaders[name]()

    @classmethod
    def names(cls) -> Sequence[str]:
        """Return the names of the engines that can serve."""
        return sorted(cls._loaders)


def _load_vllm() -> type[RolloutReplica]:
    module = importlib.import_module("verl.workers.rollout.vllm_rollout.vllm_async_server")
    found: type[RolloutReplica] = module.vLLMReplica
    return found


RolloutReplicaRegistry.register("vllm", _load_vllm)


def get_rollout_replica_class(rollout: str) -> type[RolloutReplica]:
    """Return the class of replicas of an engine; see ``RolloutReplicaRegistry.get``."""
    return RolloutReplicaRegistry.get(rollout)
