"""A worker group of Ray actors."""

import copy
import inspect
import itertools
import logging
import os
import secrets
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeVar

import ray
from ray import exceptions
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from verl.errors import (
    CallSite,
    WorkerDiedError,
    WorkerError,
    WorkerInputError,
    WorkerTaskError,
    WorkerTimeoutError,
    WrongInput,
)
from verl.protocol import DataProto, DataProtoFuture, _padding_size_key, delayed_copies
from verl.single_controller.base.actor import Actor
from verl.single_controller.base.decorator import Args, CollectFn, DispatchFn, Kwargs, attach_future_values
from verl.single_controller.base.driver_phase import current_phase
from verl.single_controller.base.worker import WorkerHelper
from verl.single_controller.base.worker_group import WorkerGroup, registered_methods, strip_padding
from verl.single_controller.ray.resource_pool import (
    ActorOptions,
    RayClassWithInitArgs,
    RayResourcePool,
    RuntimeEnv,
    bundle_nodes,
    sort_placement_group_by_node_ip,
)
from verl.utils.net_utils import LOOPBACK
from verl.utils.process.lifetime import is_stopped, oom_kills, out_of_memory_since
from verl.utils.profiler.captures import nsight_options
from verl.utils.ray_utils import without_nsight

if TYPE_CHECKING:
    from ray import ObjectRef

    from verl.single_controller.base.actor import Ref

logger = logging.getLogger(__name__)

T = TypeVar("T")

DEFAULT_CALL_TIMEOUT_S = 7200.0

NsightOptions = dict[str, str | int | float | bool | None]
Refs = Sequence["Ref"]

_DEATHS = (
    exceptions.ActorDiedError,
    exceptions.ActorUnavailableError,
    exceptions.LocalRayletDiedError,
    exceptions.NodeDiedError,
    exceptions.OutOfMemoryError,
    exceptions.OwnerDiedError,
    exceptions.WorkerCrashedError,
)

# An error of a living worker may follow from the death of a peer, which can show this much later.
PEER_GRACE_S = 3.0
# Time for killed actors to disappear.
KILL_GRACE_S = 15.0


def func_generator(
    group: "RayWorkerGroup",
    method_name: str,
    dispatch_fn: DispatchFn,
    collect_fn: CollectFn,
    execute_fn: Callable[..., Refs],
    blocking: bool,
) -> Callable[..., Any]:
    """Return the driver's side of a registered method: dispatch, execute, wait, collect, strip padding."""

    def call(*args: T, **kwargs: T) -> Any:
        split_args, split_kwargs = dispatch_fn(group, *args, **kwargs)
        padding = split_kwargs.pop(_padding_size_key, 0)
        started = execute_fn(method_name, *split_args, **split_kwargs)
        with delayed_copies():
            output = collect_fn(group, group.wait(started, method_name) if blocking else started)
        if isinstance(output, DataProtoFuture):
            output.wait_fn = group.waiter(method_name, started)
            output.timeout_s = group.call_timeout_s
        return strip_padding(output, padding) if padding else output

    return call


class RayWorkerGroup(WorkerGroup):
    """Actors of one class in the bundles of a resource pool, or actors that exist already.

    Every wait has a deadline: ``call_timeout_s`` for a call, ``ray_wait_register_center_timeout`` for placement and
    for the construction of the workers. The first failure ends all actors of the group and of the groups of its pool.
    """

    # Trainers of users call every public method, also those that nothing in this repository calls.

    def __init__(
        self,
        resource_pool: RayResourcePool | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        bin_pack: bool = True,
        name_prefix: str | None = None,
        detached: bool = False,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Actor] | None = None,
        ray_wait_register_center_timeout: float = 300,
        **kwargs: Any,
    ) -> None:
        super().__init__(resource_pool, **kwargs)
        self.ray_cls_with_init = ray_cls_with_init
        self.name_prefix = secrets.token_hex(3) if name_prefix is None else name_prefix
        self.role = ray_cls_with_init.raw_class.__name__ if ray_cls_with_init is not None else self.name_prefix
        self.call_timeout_s = float(kwargs.get("call_timeout_s") or DEFAULT_CALL_TIMEOUT_S)
        self.device_name: str = kwargs.get("device_name", "cuda")
        self.customized_worker_env = _checked_worker_env(kwargs.get("worker_env") or {})
        self._start_timeout_s = float(ray_wait_register_center_timeout)
        self._kwargs = {**kwargs, "ray_wait_register_center_timeout": ray_wait_register_center_timeout}
        self._starting: list[ObjectRef[Place]] = []
        self._places: list[Place] = []
        self._pools: list[RayResourcePool] = []
        self.fused_worker_used = ray_cls_with_init is not None and ray_cls_with_init.fused_worker_used
        self.sub_cls_name = ""
        self.wg_dict: dict[str, RayWorkerGroup] = {}
        if resource_pool is None:
            self._attach(worker_names or [], worker_handles)
        elif ray_cls_with_init is None:
            raise ValueError("a RayWorkerGroup in a resource pool needs ray_cls_with_init")
        else:
            self._create_workers(resource_pool, ray_cls_with_init, bin_pack, detached)
            self._join_pool(resource_pool)
        if ray_cls_with_init is not None:
            self._bind_worker_method(ray_cls_with_init.raw_class, func_generator)

    # ---- construction

    def _join_pool(self, pool: RayResourcePool) -> None:
        self._pools.append(pool)
        pool.groups.add(self)

    def _attach(self, names: Sequence[str], handles: Sequence[Actor] | None) -> None:
        if not names and not handles:
            raise ValueError("a RayWorkerGroup needs a resource pool, worker_names or worker_handles")
        self._workers = list(handles) if handles else [ray.get_actor(name) for name in names]
        self._worker_names = list(names) or [f"{self.name_prefix}:{rank}" for rank in range(len(self._workers))]
        if len(self._workers) != len(self._worker_names):
            raise ValueError(f"got {len(self._worker_names)} worker names for {len(self._workers)} handles")

    def _create_workers(self, pool: RayResourcePool, cia: RayClassWithInitArgs, bin_pack: bool, detached: bool) -> None:
        strategy = "STRICT_PACK" if bin_pack else "PACK"
        groups = pool.get_placement_groups(strategy, device_name=self.device_name, timeout_s=self._start_timeout_s)
        # A resumed run reads the shard of each rank from the disk of its node, so ranks must land on the same nodes.
        groups = sort_placement_group_by_node_ip(groups)
        local_world_size = pool.store[0]
        self.master_address, self.master_port = self._choose_rendezvous(groups)
        rank = 0
        for pg_index, group in enumerate(groups):
            if group.bundle_count < local_world_size:
                raise ValueError(f"placement group {pg_index} has {group.bundle_count} of {local_world_size} bundles")
            for local_rank in range(local_world_size):
                name = f"{self.name_prefix}{cia.raw_class.__name__}_{pg_index}:{local_rank}"
                env = self._worker_env(rank, pool.world_size, local_world_size)
                cia.update_options(self._actor_options(cia, pool, name, env, detached))
                worker = cia(
                    placement_group=group,
                    placement_group_bundle_idx=local_rank,
                    use_gpu=pool.use_gpu,
                    num_gpus=_share(pool.max_colocate_count),
                    device_name=self.device_name,
                )
                self._workers.append(worker)
                self._worker_names.append(name)
                rank += 1
        # An actor answers its first call when its constructor has returned. ``wait`` looks at these answers before it
        # waits for any other call, so that a constructor has its own deadline and is named when it fails.
        self._starting = [worker.__ray_call__.remote(_place) for worker in self._workers]

    def _choose_rendezvous(self, groups: Sequence[PlacementGroup]) -> tuple[str, str]:
        """Return address and port of the workers' rendezvous; the loopback address if all are on one node."""
        nodes = [node for group in groups for node in bundle_nodes(group)]
        if nodes[0] == ray.get_runtime_context().get_node_id():
            address, port = WorkerHelper.get_available_master_addr_port()
        else:
            strategy = PlacementGroupSchedulingStrategy(groups[0], 0)
            ask = ray.remote(num_cpus=0)(WorkerHelper.get_available_master_addr_port)
            ref = ask.options(scheduling_strategy=strategy, **without_nsight()).remote()
            address, port = ray.get(ref, timeout=self._start_timeout_s)
        return LOOPBACK if len({*nodes}) == 1 else address, port

    def _worker_env(self, rank: int, world_size: int, local_world_size: int) -> dict[str, str]:
        return {
            "WORLD_SIZE": str(world_size),
            "RANK": str(rank),
            "WG_PREFIX": self.name_prefix,
            "WG_BACKEND": "ray",
            "RAY_LOCAL_WORLD_SIZE": str(local_world_size),
            "MASTER_ADDR": str(self.master_address),
            "MASTER_PORT": str(self.master_port),
            **self.customized_worker_env,
        }

    def _actor_options(
        self, cia: RayClassWithInitArgs, pool: RayResourcePool, name: str, env: dict[str, str], detached: bool
    ) -> ActorOptions:
        user_env = cia._options.get("runtime_env", {})
        runtime_env: RuntimeEnv = {**user_env, "env_vars": {**user_env.get("env_vars", {}), **env}}
        if self._kwargs.get("profile_steps") and self.device_name == "cuda":
            runtime_env.pop("nsight", None)  # the entry of the rank before
            runtime_env["_nsight"] = None  # Ray would otherwise pass on the entry of this process
            nsight = _nsight_options(self._kwargs.get("worker_nsight_options"), len(self._kwargs["profile_steps"]))
            ranks = self._kwargs.get("profile_ranks")
            if ranks is None or int(env["RANK"]) in ranks:
                file = f"worker_{pool.name_prefix or self.name_prefix}_rank{env['RANK']}"
                runtime_env["nsight"] = nsight_options(nsight, self._kwargs.get("profile_save_path"), file)
        else:
            runtime_env |= without_nsight().get("runtime_env", {})
        actor: ActorOptions = {"runtime_env": runtime_env, "name": name}
        # On a CPU the actors of a bundle divide its one core; on an accelerator a bundle has a core for each actor.
        actor["num_cpus"] = _share(pool.max_colocate_count) if self.device_name == "cpu" else 1
        if _is_async(cia.raw_class):  # above Ray's default of 1,000, calls of health and abort would wait
            actor["max_concurrency"] = cia._options.get("max_concurrency", _MOST_CALLS)
        if detached:
            actor["lifetime"] = "detached"
        return actor

    @classmethod
    def from_detached(
        cls,
        name_prefix: str | None = None,
        worker_names: Sequence[str] | None = None,
        worker_handles: Sequence[Actor] | None = None,
        ray_cls_with_init: RayClassWithInitArgs | None = None,
        **kwargs: Any,
    ) -> Self:
        """Attach to existing actors, by names or handles."""
        kwargs |= {"worker_names": worker_names, "worker_handles": worker_handles}
        return cls(None, ray_cls_with_init, name_prefix=name_prefix, **kwargs)

    # ---- roles that share the actors

    def spawn(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """Return one group per role; all share the actors, and ``<role>_<method>`` is called as ``<method>``."""
        groups = {}
        for role in prefix_set:
            cls = self._role_class(role)
            group = self._twin()
            group.role = role
            if self.fused_worker_used:
                group.sub_cls_name = role
                group._bind_worker_method(cls, func_generator)
            else:
                for name in registered_methods(cls):
                    if hasattr(group, f"{role}_{name}"):
                        setattr(group, name, getattr(group, f"{role}_{name}"))
            groups[role] = group
        return groups

    def _twin(self) -> Self:
        twin = self.from_detached(
            self.name_prefix, self._worker_names, self._workers, self.ray_cls_with_init, **self._kwargs
        )
        twin.master_address = self.master_address
        twin.master_port = self.master_port
        twin._starting = self._starting
        twin._places = self._places
        for pool in self._pools:
            twin._join_pool(pool)
        return twin

    def _role_class(self, role: str) -> type:
        if self.ray_cls_with_init is None:
            raise ValueError("the group knows no class: attach to actors with ray_cls_with_init")
        roles: dict[str, type] = getattr(self.ray_cls_with_init.raw_class, "role_classes", {})
        if role not in roles:
            raise ValueError(f"the actors hold no role {role!r}, they hold {sorted(roles)}")
        return roles[role]

    def spawn_fused(self, prefix_set: Iterable[str]) -> dict[str, Self]:
        """Return one group per role of fused actors."""
        return self.spawn(prefix_set)

    def fuse(self, prefix_set: Iterable[str]) -> None:
        """Set the group of each role as an attribute of this group."""
        self.wg_dict = self.wg_dict or dict(self.spawn(prefix_set))
        for role, group in self.wg_dict.items():
            setattr(self, role, group)

    # ---- execution

    def _remote(self, worker: Actor, method_name: str, args: Args, kwargs: Kwargs) -> "Ref":
        args, kwargs = attach_future_values(args, kwargs)
        if self.sub_cls_name:
            args = (f"{self.sub_cls_name}_fwmn_{method_name}", *args)
            method_name = self.fused_worker_execute_fn_name
        return getattr(worker, method_name).remote(*args, **kwargs)

    def execute_rank_zero_async(self, method_name: str, *args: T, **kwargs: T) -> "Ref":
        """Start a method on rank zero and return its reference."""
        return self._remote(self._workers[0], method_name, args, kwargs)

    def execute_rank_zero_sync(self, method_name: str, *args: T, **kwargs: T) -> Any:
        """Run a method on rank zero and return its output."""
        return self.wait(self.execute_rank_zero_async(method_name, *args, **kwargs), method_name)

    execute_rank_zero = execute_rank_zero_async

    def execute_all_async(self, method_name: str, *args: T, **kwargs: T) -> "list[Ref]":
        """Start a method on all ranks and return their references.

        If every argument is a list with one element per worker, element i goes to rank i; else all get everything.
        """
        size = self.world_size
        values: list[Any] = [*args, *kwargs.values()]
        if not all(isinstance(value, list) and len(value) == size for value in values):
            values = [[value] * size for value in values]
        shared = [_share_batches(value) for value in values]
        named = dict(zip(kwargs, shared[len(args) :], strict=True))
        return [
            self._remote(
                worker, method_name, tuple(arg[i] for arg in shared[: len(args)]), {k: v[i] for k, v in named.items()}
            )
            for i, worker in enumerate(self._workers)
        ]

    def execute_all_sync(self, method_name: str, *args: T, **kwargs: T) -> list[Any]:
        """Run a method on all ranks and return their outputs."""
        return self.wait(self.execute_all_async(method_name, *args, **kwargs), method_name)

    execute_all = execute_all_async

    # ---- waiting

    def wait(self, refs: Any, method_name: str = "call", site: CallSite | None = None) -> Any:
        """Wait, under the group's deadline, for one reference or for a list with one per rank; return the values.

        Raises: WorkerDiedError, WorkerTaskError or WorkerTimeoutError, after ending the actors.
        """
        single = isinstance(refs, ray.ObjectRef)
        ref_list: list[Ref] = [refs] if single else list(refs)
        where = site or self._site(method_name)
        if self._starting:  # once, until all workers are constructed
            construction = replace(where, method=f"__init__ (before {where.method})")
            self._places = self._wait_for(self._starting, self._start_timeout_s, construction)
            self._starting = []
        values = self._wait_for(ref_list, self.call_timeout_s, where)
        return values[0] if single else values

    def _wait_for(self, refs: "list[Ref]", limit_s: float, site: CallSite) -> list[Any]:
        places: Sequence[Place | None] = self._places or [None] * self.world_size
        members = zip(self._worker_names, self._workers, places, strict=True)
        seats = [Seat(rank, *member) for rank, member in enumerate(members)]
        try:
            return wait_all(site, seats, refs, limit_s)
        except WorkerError as error:
            logger.error("%s", str(error).partition("\n")[0])  # the raised error carries the trace
            self.kill()
            raise

    def wait_for_callers(self, callers: Sequence[tuple[str, Actor]], refs: Refs, method_name: str) -> list[Any]:
        """Wait, under the group's deadline, for one call of each of other actors, which call workers of this group.

        Args: ``callers`` are the names and handles of the actors.
        Raises: as ``wait``; a worker that is dead or stopped is named before the actors that wait for it.
        """
        places: Sequence[Place | None] = self._places or [None] * self.world_size
        members = zip(self._worker_names, self._workers, places, strict=True)
        seats = [Seat(rank, name, actor) for rank, (name, actor) in enumerate(callers)]
        seats += [Seat(rank, *member) for rank, member in enumerate(members)]
        try:
            return wait_all(self._site(method_name), seats, refs, self.call_timeout_s)
        except WorkerError as error:
            logger.error("%s", str(error).partition("\n")[0])
            self.kill()
            kill_all([actor for _, actor in callers])
            raise

    def waiter(self, method_name: str, started: Any) -> "Callable[[list[Ref]], list[Any]]":
        """Return a function that waits for this call and reports errors under the current phase.

        It waits for every rank in ``started``, so that the error of a rank whose output is not collected shows at
        once, and returns the results of the given references.
        """
        site = self._site(method_name)
        every = list(started) if isinstance(started, list | tuple) else [started]

        def wait(refs: "list[Ref]") -> list[Any]:
            values = dict(zip(every, self.wait(every, method_name, site), strict=True))
            return [values[ref] for ref in refs]

        return wait

    def _site(self, method_name: str) -> CallSite:
        pool = self._pools[0].name_prefix if self._pools else ""
        name = method_name.removeprefix(f"{self.role}_")
        return CallSite(pool or self.name_prefix, self.role, name, *current_phase())

    def kill(self) -> None:
        """End every actor of this group and of the groups in its resource pools, and wait until they are gone."""
        # Groups of a pool share devices, and often processes and collectives: if only the actors that failed ended, the
        # others would wait for them, and hold their memory.
        groups: set[WorkerGroup] = {self}
        for pool in self._pools:
            groups.update(pool.groups)
        for group in groups:
            group.ended = True
        kill_all([worker for group in groups for worker in group._workers])

    def _is_worker_alive(self, worker: Actor) -> bool:
        from ray.util.state import get_actor

        state = get_actor(worker._actor_id.hex())
        return state is not None and getattr(state, "state", "") == "ALIVE"

    # ---- properties

    @property
    def workers(self) -> list[Actor]:
        """The actors, by rank."""
        return self._workers

    @property
    def worker_names(self) -> list[str]:
        """The names of the actors, by rank."""
        return self._worker_names


def _share(max_colocate_count: int) -> float:
    """Return an actor's part of a bundle, rounded down to Ray's unit so that all fit."""
    return int(10000 / max_colocate_count) / 10000


def _share_batches(values: list[T]) -> "list[T | Ref]":
    """Put a batch that several workers get into the object store once."""
    uses = Counter(map(id, values))
    shared = {id(value): value for value in values if uses[id(value)] > 1 and isinstance(value, DataProto)}
    stored = {key: ray.put(value) for key, value in shared.items()}
    return [stored.get(id(value), value) for value in values]


_RESERVED_ENV = ("WORLD_SIZE", "RANK", "WG_PREFIX", "WG_BACKEND", "RAY_LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def _checked_worker_env(worker_env: Mapping[str, T]) -> dict[str, str]:
    taken = sorted(set(worker_env) & set(_RESERVED_ENV))
    if taken:
        raise ValueError(f"worker_env must not set {taken}: the worker group does")
    return {name: str(value) for name, value in worker_env.items()}


_MOST_CALLS = 100_000


def _is_async(cls: type) -> bool:
    """Return whether all methods of an actor run in one event loop; else ``max_concurrency`` would start threads."""
    return any(inspect.iscoroutinefunction(method) for _, method in inspect.getmembers(cls, inspect.isfunction))


def _nsight_options(options: NsightOptions | None, num_steps: int) -> NsightOptions:
    if options is None:
        raise ValueError("worker_nsight_options must be given when profile_steps is not empty on cuda")
    result = copy.deepcopy(dict(options))
    if result.get("capture-range-end") is None:
        result["capture-range-end"] = f"repeat-shutdown:{6 * num_steps}"
    return result


# Waiting for actors under a deadline, and the cause of a failure


class Place(NamedTuple):
    """The location of a worker: the id of its node, and its process there."""

    node: str
    pid: int


def _place(worker: T) -> Place:
    return Place(ray.get_runtime_context().get_node_id(), os.getpid())


@dataclass(frozen=True)
class Seat:
    """A worker of a group: its rank, its name, its actor, and where it runs if that is known."""

    rank: int
    name: str
    actor: Actor
    place: Place | None = None

    def is_stopped(self) -> bool:
        """Whether SIGSTOP holds the process; False if it runs on another node."""
        here = ray.get_runtime_context().get_node_id()
        return self.place is not None and self.place.node == here and is_stopped(self.place.pid)


def wait_all(site: CallSite, seats: Sequence[Seat], refs: Refs, limit_s: float) -> list[Any]:
    """Return the values of all references, the results of one call.

    Raises: WorkerDiedError or WorkerTaskError for the first failed result, WorkerTimeoutError after ``limit_s``.
    """
    deadline = time.monotonic() + limit_s
    killed_before = oom_kills()
    position = {ref: index for index, ref in enumerate(refs)}
    values: list[Any] = [None] * len(refs)
    pending = list(position)
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            raise explain_timeout(site, seats, refs, limit_s)
        try:
            values[position[done[0]]] = ray.get(done[0], timeout=max(1.0, deadline - time.monotonic()))
        except RayError as error:
            if isinstance(error, exceptions.GetTimeoutError) and not isinstance(error, RayTaskError):
                raise explain_timeout(site, seats, refs, limit_s) from None
            failure = explain(site, seats, refs, position[done[0]], error, killed_before)
            raise failure from failure.__cause__
    if len(position) < len(refs):  # the same reference was given more than once
        values = [values[position[ref]] for ref in refs]
    return values


def find_death(seats: Sequence[Seat], refs: Refs, seconds: float) -> tuple[Seat, RayError] | None:
    """Look for a dead worker in the pending results and by asking every actor.

    ``refs`` are the results of the call, one per seat, or empty.
    """
    watched: dict[Ref, Seat] = dict(zip(refs, seats, strict=False))
    watched.update({seat.actor.__ray_ready__.remote(): seat for seat in seats})
    pending = list(watched)
    deadline = time.monotonic() + seconds
    while pending:
        done, pending = ray.wait(pending, num_returns=1, timeout=max(0.0, deadline - time.monotonic()))
        if not done:
            return None
        try:
            ray.get(done[0], timeout=1)
        except RayError as error:
            if _is_death(error):
                return watched[done[0]], error
    return None


def kill_all(actors: Sequence[Actor]) -> None:
    """Kill actors and wait up to ``KILL_GRACE_S`` until their processes are gone."""
    unique = list({actor._actor_id: actor for actor in actors}.values())
    for actor in unique:
        ray.kill(actor, no_restart=True)  # type: ignore[arg-type]  # a handle, see `Actor`
    gone = [actor.__ray_ready__.remote() for actor in unique]
    if not gone:
        return
    _, pending = ray.wait(gone, num_returns=len(gone), timeout=KILL_GRACE_S)
    if pending:
        logger.warning("%d of %d actors did not end within %s s", len(pending), len(unique), KILL_GRACE_S)


def _is_death(error: RayError) -> bool:
    # An error of a living worker is also an instance of its cause's class, perhaps the death of an actor it started.
    return isinstance(error, _DEATHS) and not isinstance(error, RayTaskError)


def _text(error: RayError) -> str:
    """Return the type and message of an error, those of the worker's own exception first."""
    if isinstance(error, exceptions.RayActorError) and error.actor_init_failed:
        return f"{_last_raised(str(error))}\n--- in the worker\n{error}"
    if not isinstance(error, RayTaskError):
        return f"{type(error).__name__}: {error}"
    # Ray keeps the exception, or only its class if the exception could not be pickled.
    cause = error.cause
    if isinstance(cause, BaseException):
        message = "".join(traceback.format_exception_only(cause)).strip()
    else:
        message = (cause if isinstance(cause, type) else type(error)).__name__
    return f"{message}\n--- in the worker\n{error}"


def _death(error: RayError, killed_before: int | None) -> str:
    """Return the text of a death; its first line tells if the kernel of this machine had to free memory."""
    first, *rest = _text(error).split("\n", 1)
    return "\n".join([first + out_of_memory_since(killed_before), *rest])


def _last_raised(trace: str) -> str:
    """Return the text after the last frame of a stack trace."""
    lines = trace.splitlines()
    last_frame = max((at for at, line in enumerate(lines) if line.startswith("  File ")), default=-1)
    message = itertools.dropwhile(lambda line: line.startswith(" "), lines[last_frame + 1 :])
    return "\n".join(message).strip() or lines[0]


def explain(
    site: CallSite, seats: Sequence[Seat], refs: Refs, position: int, error: RayError, killed_before: int | None = None
) -> WorkerError:
    """Turn the first failed result of a call, that at ``position``, into an error that names its cause.

    ``killed_before`` is the number of ``oom_kills`` before the call.
    """
    seat = seats[position] if position < len(seats) else seats[0]
    if _is_death(error):
        return WorkerDiedError(site, seat.rank, seat.name, _death(error, killed_before))
    death = find_death(seats, refs, PEER_GRACE_S)
    if death is not None:
        dead, death_error = death
        first = f"\nbefore that, rank {seat.rank} reported {_text(error)}" if dead.rank != seat.rank else ""
        return WorkerDiedError(site, dead.rank, dead.name, _death(death_error, killed_before) + first)
    silent = _silent(seats, refs) if "timed out" in str(error).lower() else []
    if silent:
        reported = f"rank {seat.rank} gave up waiting in a collective: {_text(error)}"
        return WorkerTimeoutError(site, silent[0].rank, silent[0].name, reported, tuple(quiet.rank for quiet in silent))
    cause = error.cause if isinstance(error, RayTaskError) and isinstance(error.cause, Exception) else error
    cls = WorkerInputError if isinstance(cause, WrongInput) else WorkerTaskError
    task_error = cls(site, seat.rank, seat.name, _text(error))
    task_error.__cause__ = cause
    return task_error


def _silent(seats: Sequence[Seat], refs: Refs) -> list[Seat]:
    """Return the seats whose result is still pending."""
    unique = list(dict.fromkeys(refs))
    done, _ = ray.wait(unique, num_returns=len(unique), timeout=0)
    return [seat for seat, ref in zip(seats, refs, strict=False) if ref not in set(done)]


def explain_timeout(site: CallSite, seats: Sequence[Seat], refs: Refs, timeout_s: float) -> WorkerError:
    """Name the workers without an answer at the deadline; if some are stopped, only these: the others wait for them."""
    silent = _silent(seats, refs) or list(seats[:1])
    indirect = seats[len(refs) :]  # workers that are called by the workers whose results are awaited
    stopped = [seat for seat in (*silent, *indirect) if seat.is_stopped()]
    named = stopped or silent
    reason = f"no answer within {timeout_s:g} s" + ("; SIGSTOP holds its process" if stopped else "")
    return WorkerTimeoutError(site, named[0].rank, named[0].name, reason, tuple(seat.rank for seat in named))
