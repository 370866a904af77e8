"""Resource pools: place the actors of a group, and create them."""

import secrets
import weakref
from collections.abc import Sequence
from typing import Any, TypedDict, TypeVar

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from verl.errors import PlacementError
from verl.single_controller.base.actor import Actor
from verl.single_controller.base.worker_group import ClassWithInitArgs, ResourcePool, WorkerGroup

T = TypeVar("T")
Bundle = dict[str, float]
RuntimeEnv = dict[str, Any]
"""Entries that the plugins of Ray read; each plugin defines the type of its entry."""

# Ray counts resources that others have just released as free only after a moment.
_RELEASE_GRACE_S = 5.0
_ACCELERATOR_RESOURCE = {"cuda": "GPU", "npu": "NPU"}


class RayResourcePool(ResourcePool):
    """Placement groups, one per node, with a bundle per process."""

    def __init__(
        self,
        process_on_nodes: Sequence[int] | None = None,
        use_gpu: bool = True,
        name_prefix: str | None = None,
        max_colocate_count: int = 10,
        detached: bool = False,
        accelerator_type: str | None = None,
    ) -> None:
        super().__init__(process_on_nodes, max_colocate_count)
        self.use_gpu = use_gpu
        self.name_prefix = secrets.token_hex(3) if name_prefix is None else name_prefix
        self.pgs: list[PlacementGroup] | None = None
        self.detached = detached
        self.accelerator_type = accelerator_type
        self.groups: weakref.WeakSet[WorkerGroup] = weakref.WeakSet()

    def bundle(self, device_name: str = "cuda") -> Bundle:
        """Return the resources of one process; on a CPU, one core that all colocated actors share."""
        if device_name == "cpu":
            return {"CPU": 1}
        bundle: Bundle = {"CPU": self.max_colocate_count}
        if self.use_gpu and device_name in _ACCELERATOR_RESOURCE:
            bundle[_ACCELERATOR_RESOURCE[device_name]] = 1
        if self.accelerator_type is not None:
            bundle[self.accelerator_type] = 1e-4
        return bundle

    def release(self) -> None:
        """Give the resources back; actors that are still in the pool end."""
        for group in self.pgs or ():
            remove_placement_group(group)
        self.pgs = None

    def get_placement_groups(
        self, strategy: str = "STRICT_PACK", name: str | None = None, device_name: str = "cuda", timeout_s: float = 300
    ) -> list[PlacementGroup]:
        """Return one ready placement group per node; the first call creates them.

        Raises: PlacementError, a ValueError, that names the demand, the cluster's resources and the shortage.
        """
        if self.pgs is not None:
            return self.pgs
        bundle = self.bundle(device_name)
        schemes = [[dict(bundle) for _ in range(count)] for count in self._store]
        check_placement(schemes, strategy, self.name_prefix)
        enough_now = not _shortage(_sum_bundles(schemes), ray.available_resources())
        prefix = f"{self.name_prefix if name is None else name}verl_group_{'_'.join(map(str, self._store))}:"
        lifetime = "detached" if self.detached else None
        groups = [
            placement_group(bundles=bundles, strategy=strategy, name=f"{prefix}{index}", lifetime=lifetime)
            for index, bundles in enumerate(schemes)
        ]
        ready = [group.ready() for group in groups]
        limit = timeout_s if enough_now else min(timeout_s, _RELEASE_GRACE_S)
        _, pending = ray.wait(ready, num_returns=len(ready), timeout=limit)
        if pending:
            available = ray.available_resources()
            for group in groups:
                remove_placement_group(group)
            raise PlacementError(
                f"resource pool {self.name_prefix!r} was not placed within {limit:.0f} s: it asks for "
                f"{_describe(schemes)} ({strategy}); the cluster has {_pick_resources(available, bundle)} free of "
                f"{_pick_resources(ray.cluster_resources(), bundle)}; missing "
                f"{_shortage(_sum_bundles(schemes), available) or 'one node that holds a whole group'}"
            )
        self.pgs = groups
        return groups


def _sum_bundles(schemes: Sequence[Sequence[Bundle]]) -> Bundle:
    total: Bundle = {}
    for bundles in schemes:
        for bundle in bundles:
            for name, amount in bundle.items():
                total[name] = total.get(name, 0) + amount
    return total


def _shortage(asked: Bundle, there: dict[str, float]) -> Bundle:
    lacking = {name: amount - there.get(name, 0) for name, amount in asked.items()}
    return {name: round(amount, 4) for name, amount in lacking.items() if amount > 1e-9}


def _pick_resources(resources: dict[str, float], names: Bundle) -> Bundle:
    return {name: resources.get(name, 0) for name in names}


def _describe(schemes: Sequence[Sequence[Bundle]]) -> str:
    return " + ".join(f"{len(bundles)} x {bundles[0] if bundles else {}} on one node" for bundles in schemes)


def check_placement(schemes: Sequence[Sequence[Bundle]], strategy: str, pool_name: str) -> None:
    """Check that the whole cluster, busy or not, can hold the bundles.

    Raises: PlacementError, a ValueError, that names the demand, the cluster's resources and the shortage.
    """
    asked = _sum_bundles(schemes)
    machines = [dict(node["Resources"]) for node in ray.nodes() if node["Alive"]]
    total = _sum_bundles([machines])
    start = f"resource pool {pool_name!r} asks for {_describe(schemes)}"
    missing = _shortage(asked, total)
    if missing:
        raise PlacementError(f"{start}, the cluster has {_pick_resources(total, asked)}: missing {missing}")
    if strategy != "STRICT_PACK":
        return
    for bundles in sorted(schemes, key=len, reverse=True):
        need = _sum_bundles([bundles])
        fitting = [machine for machine in machines if not _shortage(need, machine)]
        if not fitting:
            sizes = [_pick_resources(machine, need) for machine in machines]
            raise PlacementError(f"{start}, the nodes still have {sizes}: missing one node with {need}")
        host = min(fitting, key=lambda machine: sum(machine.get(name, 0) for name in need))
        for name, amount in need.items():
            host[name] -= amount


def extract_pg_from_exist(
    resource_pools: dict[str, RayResourcePool], src_role_names: Sequence[str], resource_pool: RayResourcePool
) -> list[PlacementGroup]:
    """Pick one placement group of other pools per node of a new pool, the largest first.

    Raises: ValueError, which is also a RuntimeError, when no remaining group holds the processes of a node.
    """
    sources = [
        pg for name, pool in resource_pools.items() if name in src_role_names for pg in pool.get_placement_groups()
    ]
    left = sorted(sources, key=lambda pg: pg.bundle_count, reverse=True)
    chosen: dict[int, PlacementGroup] = {}
    for node, count in sorted(enumerate(resource_pool.store), key=lambda pair: pair[1], reverse=True):
        if not left or left[0].bundle_count < count:
            sizes = [pg.bundle_count for pg in sources]
            raise PlacementError(f"processes per node {resource_pool.store} do not fit placement group sizes {sizes}")
        chosen[node] = left.pop(0)
    return [chosen[node] for node in range(len(resource_pool.store))]


def merge_resource_pool(rp1: RayResourcePool, rp2: RayResourcePool) -> RayResourcePool:
    """Join two pools with their placement groups.

    Raises: ValueError, which is also a RuntimeError, when they differ in more than their nodes.
    """
    for name in ("use_gpu", "max_colocate_count", "n_gpus_per_node", "detached"):
        if getattr(rp1, name) != getattr(rp2, name):
            raise PlacementError(f"pools to merge differ in {name}: {getattr(rp1, name)} and {getattr(rp2, name)}")
    merged = RayResourcePool(
        rp1.store + rp2.store, rp1.use_gpu, f"{rp1.name_prefix}_{rp2.name_prefix}", rp1.max_colocate_count, rp1.detached
    )
    merged.pgs = rp1.get_placement_groups() + rp2.get_placement_groups()
    merged.groups = rp1.groups | rp2.groups
    return merged


def bundle_nodes(group: PlacementGroup) -> list[str]:
    """Return the node id of each bundle of a ready placement group."""
    nodes = placement_group_table(group)["bundles_to_node_id"]
    return [nodes[index] for index in range(group.bundle_count)]


def sort_placement_group_by_node_ip(pgs: list[PlacementGroup]) -> list[PlacementGroup]:
    """Order placement groups by the address of their node, so that ranks are the same in every run."""
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    return sorted(pgs, key=lambda pg: addresses[bundle_nodes(pg)[0]])


class ActorOptions(TypedDict, total=False):
    """The options of Ray with which an actor is created."""

    name: str
    lifetime: str
    max_concurrency: int
    num_cpus: float
    num_gpus: float
    resources: dict[str, float]
    runtime_env: RuntimeEnv
    scheduling_strategy: PlacementGroupSchedulingStrategy


class RayClassWithInitArgs(ClassWithInitArgs):
    """An actor class, its arguments and its Ray options."""

    def __init__(self, cls: Any, *args: T, **kwargs: T) -> None:  # an actor class or its plain class
        super().__init__(cls, *args, **kwargs)
        self._options: ActorOptions = {}
        self._additional_resource: dict[str, float] = {}

    @property
    def raw_class(self) -> type:
        """The plain class behind the actor class."""
        return getattr(self.cls, "__ray_actor_class__", self.cls)

    def set_additional_resource(self, additional_resource: dict[str, float]) -> None:
        """Ask for more resources than the device; applied when there is more than one."""
        self._additional_resource = additional_resource

    def update_options(self, options: ActorOptions) -> None:
        """Merge into the options with which the actor is created."""
        self._options.update(options)

    def __call__(
        self,
        placement_group: PlacementGroup | None = None,
        placement_group_bundle_idx: int = 0,
        use_gpu: bool = True,
        num_gpus: float = 1,
        sharing_with: Actor | None = None,
        device_name: str = "cuda",
    ) -> Actor:
        """Create the actor in a bundle, or on the node and devices of the actor ``sharing_with``."""
        if sharing_with is not None:
            node_id, devices = ray.get(
                [sharing_with.get_node_id.remote(), sharing_with.get_cuda_visible_devices.remote()], timeout=300
            )
            same_node = NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)
            cls = self.cls.options(scheduling_strategy=same_node)
            return cls.remote(*self.args, cuda_visible_devices=devices, **self.kwargs)
        if placement_group is None:
            raise ValueError("an actor needs a placement group, or an actor to share a node with")
        strategy = PlacementGroupSchedulingStrategy(placement_group, placement_group_bundle_idx)
        options: ActorOptions = {"scheduling_strategy": strategy, **self._options}
        if use_gpu and device_name == "cuda":
            options["num_gpus"] = num_gpus
        if use_gpu and device_name == "npu":
            options["resources"] = {"NPU": num_gpus}
        if len(self._additional_resource) > 1:
            options["resources"] = {**options.get("resources", {}), **self._additional_resource}
        return self.cls.options(**options).remote(*self.args, **self.kwargs)
