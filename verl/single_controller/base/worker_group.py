"""A group of workers that the driver calls as one."""

import logging
import os
import signal
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar

from verl.protocol import DataProto, DataProtoFuture
from verl.single_controller.base import decorator
from verl.single_controller.base.actor import Actor

if TYPE_CHECKING:
    from verl.single_controller.base.actor import Ref
    from verl.utils.observe.attempts import AttemptLine
    from verl.utils.observe.timeline import Part

logger = logging.getLogger(__name__)

T = TypeVar("T")
FuncGenerator = Callable[..., Callable[..., Any]]
ALIVE_TIMEOUT_S = 300


class ResourcePool:
    """The number of processes on each node."""

    def __init__(
        self, process_on_nodes: Sequence[int] | None = None, max_colocate_count: int = 10, n_gpus_per_node: int = 8
    ) -> None:
        self._store = list(process_on_nodes or [])
        self.max_colocate_count = max_colocate_count
        self.n_gpus_per_node = n_gpus_per_node

    def add_node(self, process_count: int) -> None:
        """Append a node."""
        self._store.append(process_count)

    @property
    def world_size(self) -> int:
        """Number of processes on all nodes."""
        return sum(self._store)

    def __call__(self) -> list[int]:
        return self._store

    @property
    def store(self) -> list[int]:
        """Number of processes on each node."""
        return self._store

    def local_world_size_list(self) -> list[int]:
        """Return the local world size of each process."""
        return [count for count in self._store for _ in range(count)]

    def local_rank_list(self) -> list[int]:
        """Return the local rank of each process."""
        return [rank for count in self._store for rank in range(count)]


class ClassWithInitArgs:
    """A class and its constructor arguments, for construction later."""

    def __init__(self, cls: Any, *args: T, **kwargs: T) -> None:
        self.cls = cls
        self.args: decorator.Args = args
        self.kwargs: decorator.Kwargs = kwargs
        self.fused_worker_used = False

    def __call__(self) -> Any:
        return self.cls(*self.args, **self.kwargs)


def check_workers_alive(workers: Sequence[T], is_alive: Callable[[T], bool], gap_time: float = 1) -> None:
    """Poll the workers and abort this process when one has died."""
    while True:
        for worker in workers:
            if not is_alive(worker):
                logger.error("worker %s is not alive: aborting", worker)
                os.kill(os.getpid(), signal.SIGABRT)
                return
        time.sleep(gap_time)


def registered_methods(cls: type) -> dict[str, decorator.MethodAttrs]:
    """Return the attributes of every method that ``register`` has marked, by name."""
    found: dict[str, decorator.MethodAttrs] = {}
    for name in dir(cls):
        method = getattr(cls, name, None)  # None: a descriptor that works on instances only
        attrs: decorator.MethodAttrs | None = getattr(method, decorator.MAGIC_ATTR, None)
        if callable(method) and isinstance(attrs, dict):
            found[name] = attrs
    return found


class Manager:
    """The calls of a training loop that a worker group or a manager of agent loops need not answer.

    Each method does nothing by default.
    """

    def wait_until_ready(self) -> None:
        """Wait until all actors have started."""

    def start_timeline(self) -> None:
        """Record spans from now on, for the timeline of the step."""

    def report_step(self, digests: bool) -> "list[Ref]":
        """Return references of the reports of all ranks on the step; none without reports."""
        return []

    def take_attempts(self) -> "list[AttemptLine]":
        """Return the account of all attempts since the last call of this method."""
        return []

    def take_timeline(self) -> "list[Part]":
        """Return the spans recorded since the last call of this method."""
        return []

    def flush_traces(self) -> None:
        """Wait until all traces are sent."""


def adapted(manager: T) -> T:
    """Return ``manager`` with the methods of ``Manager`` that it lacks.

    A user's fork of verl may have its own class of managers that does not derive from ``Manager``.
    """
    for name, method in vars(Manager).items():
        if not name.startswith("_") and not hasattr(manager, name):
            setattr(manager, name, MethodType(method, manager))
    return manager


class WorkerGroup(decorator.DispatchGroup, Manager, ABC):
    """Workers of one class; each of their registered methods becomes a method of the group.

    ``ended`` is true once the group has ended its workers.
    """

    fused_worker_execute_fn_name = "_fuw_execute"

    def __init__(self, resource_pool: ResourcePool | None, **kwargs: T) -> None:
        super().__init__()
        self.resource_pool = resource_pool
        self.fused_worker_used = False
        self.ended = False
        self._worker_names: list[str] = []
        self.master_address: str | None = None
        self.master_port: str | None = None

    @abstractmethod
    def _is_worker_alive(self, worker: Actor) -> bool:
        """Whether the process of a worker runs."""

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None:
        """Wait until all workers are alive, then start a thread that aborts this process when one dies.

        Raises: TimeoutError when some are not alive within ``ALIVE_TIMEOUT_S``.
        """
        deadline = time.monotonic() + ALIVE_TIMEOUT_S
        while not all(self._is_worker_alive(worker) for worker in self._workers):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not all {self.world_size} workers were alive within {ALIVE_TIMEOUT_S} s")
            time.sleep(0.1)
        threading.Thread(
            target=check_workers_alive, args=(self._workers, self._is_worker_alive, every_n_seconds), daemon=True
        ).start()

    def _bind_worker_method(self, user_defined_cls: type, func_generator: FuncGenerator) -> list[str]:
        """Create one method per registered method of the class and return their names."""
        names = []
        for name, attrs in registered_methods(user_defined_cls).items():
            mode = attrs["dispatch_mode"]
            fns = decorator.get_predefined_dispatch_fn(mode) if isinstance(mode, decorator.Dispatch) else mode
            execute_fn = getattr(self, decorator.get_predefined_execute_fn(attrs["execute_mode"])["execute_fn_name"])
            call = func_generator(self, name, **fns, execute_fn=execute_fn, blocking=attrs["blocking"])
            setattr(self, name, call)
            names.append(name)
        return names


def strip_padding(output: DataProto | DataProtoFuture | list[T], count: int) -> DataProto | DataProtoFuture | list[T]:
    """Drop the rows that automatic padding has added; a future drops them when it is collected."""
    if isinstance(output, DataProto):
        return output.slice(0, len(output) - count)
    if isinstance(output, DataProtoFuture):
        collect = output.collect_fn

        def collect_stripped(parts: list[DataProto]) -> DataProto:
            data = collect(parts)
            return data.slice(0, len(data) - count)

        output.collect_fn = collect_stripped
        return output
    if isinstance(output, list):
        return output[: len(output) - count]
    return output
