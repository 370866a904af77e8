"""Which processes a run has, on which devices, and how they are started."""

import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from verl.single_controller.base.errors import PlacementError
from verl.single_controller.ray import (
    RayClassWithInitArgs,
    RayResourcePool,
    RayWorkerGroup,
    create_colocated_worker_cls,
)
from verl.trainer.ppo.profiling import nsys_group_options
from verl.trainer.ppo.steps import set_total_training_steps, steps_known_early
from verl.trainer.ppo.utils import Role, needs_full_kl
from verl.utils.config import omega_conf_to_dataclass

GROUP_OF_ROLE = {
    Role.ActorRollout: "actor_rollout",
    Role.Critic: "critic",
    Role.RefPolicy: "ref",
    Role.RewardModel: "rm",
}


@dataclass
class ResourcePoolManager:
    """Pools of worker processes by name, and the pool of each role.

    ``resource_pool_spec`` maps the name of a pool to its number of processes on each node. A process has a GPU (or
    NPU); on ``device_name="cpu"`` it has a CPU core.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    device_name: str = "cuda"

    def create_resource_pool(self) -> None:
        """Make the pools, once.

        Raises: PlacementError, a ValueError, when the cluster does not have what they ask for.
        """
        if self.resource_pool_dict:
            return
        self._check_resource_available()
        for name, processes_on_nodes in self.resource_pool_spec.items():
            self.resource_pool_dict[name] = RayResourcePool(
                process_on_nodes=processes_on_nodes,
                use_gpu=self.device_name != "cpu",
                max_colocate_count=1,
                name_prefix=name,
            )

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """Return the pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of worker processes in all pools."""
        return sum(count for counts in self.resource_pool_spec.values() for count in counts)

    def _check_resource_available(self) -> None:
        """Hold the demand of every pool to what the nodes of the cluster have.

        Raises: PlacementError naming resource, demand and supply.
        """
        kind = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}[self.device_name]
        supply = sorted((int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
        demand = sorted((count for counts in self.resource_pool_spec.values() for count in counts), reverse=True)
        where = f"the pools ask for {self.resource_pool_spec} worker processes per node, one {kind} each"
        keys = "lower trainer.n_gpus_per_node or trainer.nnodes, or start more nodes"
        if kind != "CPU" and not sum(supply):
            keys = f"write trainer.device=cpu to train on CPU cores, or start Ray where it sees the {kind}s"
        if sum(supply) < sum(demand):
            raise PlacementError(
                f"{where}: {sum(demand)} in all, and the cluster has {sum(supply)} (missing "
                f"{sum(demand) - sum(supply)}); {keys}"
            )
        if demand and demand[0] > supply[0]:
            raise PlacementError(f"{where}: {demand[0]} on one node, and the largest node has {supply[0]}; {keys}")


# ---- starting the workers


def worker_arguments(config: Any, role: Role, actor_cls: Any) -> RayClassWithInitArgs:
    """Return a worker class with the arguments that its role is constructed with."""
    if role == Role.ActorRollout:
        with_reference = needs_full_kl(config) and not config.actor_rollout_ref.model.get("lora_rank", 0)
        name = str(Role.ActorRolloutRef if with_reference else role)
        return RayClassWithInitArgs(cls=actor_cls, config=config.actor_rollout_ref, role=name)
    if role == Role.RefPolicy:
        return RayClassWithInitArgs(cls=actor_cls, config=config.actor_rollout_ref, role="ref")
    if role == Role.Critic:
        return RayClassWithInitArgs(cls=actor_cls, config=omega_conf_to_dataclass(config.critic))
    return RayClassWithInitArgs(cls=actor_cls, config=config.reward_model)


def worker_group_options(config: Any, device_name: str) -> dict[str, Any]:
    """Return what every worker group of a run is constructed with besides its classes."""
    options: dict[str, Any] = {
        "device_name": device_name,
        "ray_wait_register_center_timeout": config.trainer.ray_wait_register_center_timeout,
        "call_timeout_s": config.trainer.worker_call_timeout_s,
    }
    return options


def create_worker_groups(
    config: Any,
    role_worker_mapping: Mapping[Role, Any],
    pools: ResourcePoolManager,
    group_cls: type[RayWorkerGroup],
    device_name: str,
) -> dict[str, RayWorkerGroup]:
    """Start the processes of all roles, one group of processes per pool; returns a worker group per role name."""
    pools.create_resource_pool()
    classes: dict[str, dict[str, RayClassWithInitArgs]] = {}
    for role, name in GROUP_OF_ROLE.items():
        if role in role_worker_mapping:
            arguments = worker_arguments(config, role, role_worker_mapping[role])
            classes.setdefault(pools.mapping[role], {})[name] = arguments
    options = worker_group_options(config, device_name)
    groups: dict[str, RayWorkerGroup] = {}
    for pool_name, class_dict in classes.items():
        group = group_cls(
            resource_pool=pools.resource_pool_dict[pool_name],
            ray_cls_with_init=create_colocated_worker_cls(class_dict=class_dict),
            **options,
            **nsys_group_options(config, class_dict),
        )
        groups.update(group.spawn(prefix_set=class_dict.keys()))
    return groups


class WorkerStart:
    """The start of the worker processes, running beside whatever the driver loads in the meantime."""

    def __init__(self, total_training_steps: int, *arguments: Any) -> None:
        """Begin ``create_worker_groups(*arguments)`` in the background, for a run of so many steps."""
        self._total_training_steps = total_training_steps
        self._groups: dict[str, RayWorkerGroup] = {}
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=arguments, name="worker-start", daemon=True)
        self._thread.start()

    def _run(self, *arguments: Any) -> None:
        try:
            self._groups = create_worker_groups(*arguments)
        except BaseException as error:  # handed to the caller of result()
            self._error = error

    def result(self, total_training_steps: int) -> dict[str, RayWorkerGroup]:
        """Wait for the processes and return their worker groups.

        Raises: what their start has raised; RuntimeError when the run has another number of steps after all.
        """
        self._thread.join()
        if self._error is not None:
            raise self._error
        if total_training_steps != self._total_training_steps:
            raise RuntimeError(
                f"the data set gives {total_training_steps} steps where its files gave {self._total_training_steps}: "
                "set trainer.total_training_steps"
            )
        return self._groups


def start_workers_early(
    config: Any, role_worker_mapping: Mapping[Role, Any], pools: ResourcePoolManager, group_cls: type[RayWorkerGroup]
) -> WorkerStart | None:
    """Start the workers before the data are loaded; None where what they are constructed with is not known yet."""
    steps = steps_known_early(config)
    if steps is None:
        return None
    set_total_training_steps(config, steps)
    return WorkerStart(steps, config.copy(), role_worker_mapping, pools, group_cls, config.trainer.device)
