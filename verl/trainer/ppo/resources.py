"""Worker processes of a run: the pools of devices they run on, and how they start, if possible before the data load."""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

import ray
from omegaconf import DictConfig, OmegaConf, open_dict

from verl.base_config import omega_conf_to_dataclass
from verl.errors import PlacementError
from verl.single_controller.base.driver_phase import phase
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.colocated import create_colocated_worker_cls
from verl.single_controller.ray.worker_group import kill_all
from verl.trainer.config.keys import tree_of
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.profiling import nsys_group_options
from verl.trainer.ppo.utils import Role, WorkerClass
from verl.trainer.run.clock import CLOCK
from verl.utils.device import get_device_name
from verl.utils.failures import settle
from verl.utils.json_types import Json, JsonObject

logger = logging.getLogger(__name__)

WorkerClasses = Mapping[Role, WorkerClass]
"""Role -> Ray actor class of its worker."""
GROUP_ROLES = (Role.ActorRollout, Role.Critic, Role.RefPolicy, Role.RewardModel)
"""Roles that get a worker group, which has the name of the role."""


@dataclass
class ResourcePoolManager:
    """Pools of worker processes by name, and the pool of each role.

    ``resource_pool_spec`` maps the name of a pool to its number of processes on each node. Each process gets a GPU or
    NPU, or a CPU core with ``device_name="cpu"``. Without ``device_name`` the trainer writes that of the run to it.
    """

    resource_pool_spec: dict[str, list[int]]
    mapping: dict[Role, str]
    resource_pool_dict: dict[str, RayResourcePool] = field(default_factory=dict)
    device_name: str | None = None

    def create_resource_pool(self) -> None:
        """Make the pools, once.

        Raises: PlacementError, a ValueError, when the cluster has too few devices.
        """
        if self.resource_pool_dict:
            return
        self.device_name = self.device_name or get_device_name()
        self._check_resource_available(self.device_name)
        for name, processes_on_nodes in self.resource_pool_spec.items():
            use_gpu = self.device_name != "cpu"
            pool = RayResourcePool(processes_on_nodes, use_gpu=use_gpu, max_colocate_count=1, name_prefix=name)
            self.resource_pool_dict[name] = pool

    def get_resource_pool(self, role: Role) -> RayResourcePool:
        """Return the pool of a role."""
        return self.resource_pool_dict[self.mapping[role]]

    def get_n_gpus(self) -> int:
        """Return the number of worker processes in all pools."""
        return sum(count for counts in self.resource_pool_spec.values() for count in counts)

    def _check_resource_available(self, device_name: str) -> None:
        """Compare the demand of the pools with the devices of the cluster.

        Raises: PlacementError naming resource, demand and supply.
        """
        kind = {"cuda": "GPU", "npu": "NPU", "cpu": "CPU"}[device_name]
        supply = sorted((int(node["Resources"].get(kind, 0)) for node in ray.nodes() if node["Alive"]), reverse=True)
        demand = sorted((count for counts in self.resource_pool_spec.values() for count in counts), reverse=True)
        where = f"the pools ask for {self.resource_pool_spec} worker processes per node, one {kind} each"
        keys = "lower trainer.n_gpus_per_node or trainer.nnodes, or start more nodes"
        if kind != "CPU" and not sum(supply):
            keys = f"write trainer.device=cpu to train on CPU cores, or start Ray on nodes that have {kind}s"
        if sum(supply) < sum(demand):
            raise PlacementError(
                f"{where}: {sum(demand)} in all, and the cluster has {sum(supply)} (missing "
                f"{sum(demand) - sum(supply)}); {keys}"
            )
        if demand and demand[0] > supply[0]:
            raise PlacementError(f"{where}: {demand[0]} on one node, and the largest node has {supply[0]}; {keys}")


# ---- starting the workers


def worker_arguments(config: DictConfig, run: RunConfig, role: Role, actor_cls: WorkerClass) -> RayClassWithInitArgs:
    """Return a worker class with the arguments of its constructor: a node of the tree, which may hold a fork's keys."""
    if role == Role.ActorRollout:
        node = run.actor_rollout_ref
        with_reference = node.actor.holds_reference and node.model.lora_rank == 0
        if node.hybrid_engine and run.async_training.replay is None:  # a replay generates nothing
            name = str(Role.ActorRolloutRef if with_reference else role)
        else:
            name = "actor_ref" if with_reference else str(Role.Actor)
        return RayClassWithInitArgs(cls=actor_cls, config=config.actor_rollout_ref, role=name)
    if role == Role.RefPolicy:
        return RayClassWithInitArgs(cls=actor_cls, config=config.actor_rollout_ref, role="ref")
    node = omega_conf_to_dataclass(config.critic) if role == Role.Critic else config.reward_model
    return RayClassWithInitArgs(cls=actor_cls, config=node)


def create_worker_groups(
    config: DictConfig,
    run: RunConfig,
    role_worker_mapping: WorkerClasses,
    pools: ResourcePoolManager,
    group_cls: type[RayWorkerGroup],
    device_name: str,
) -> dict[str, RayWorkerGroup]:
    """Start the processes of all roles, one group of processes per pool; return a worker group per role name.

    ``run`` is the typed form of ``config``. A critic is started only if the run trains one, whatever roles are mapped.
    """
    pools.device_name = pools.device_name or device_name
    pools.create_resource_pool()
    classes: dict[str, dict[str, RayClassWithInitArgs]] = {}
    for role in GROUP_ROLES:
        is_needed = role != Role.Critic or run.critic is not None
        if role in role_worker_mapping and is_needed:
            arguments = worker_arguments(config, run, role, role_worker_mapping[role])
            classes.setdefault(pools.mapping[role], {})[str(role)] = arguments
    groups: dict[str, RayWorkerGroup] = {}
    for pool_name, class_dict in classes.items():
        group = group_cls(
            resource_pool=pools.resource_pool_dict[pool_name],
            ray_cls_with_init=create_colocated_worker_cls(class_dict=class_dict),
            device_name=device_name,
            ray_wait_register_center_timeout=run.trainer.ray_wait_register_center_timeout,
            call_timeout_s=run.trainer.worker_call_timeout_s,
            **nsys_group_options(run, class_dict),
        )
        groups.update(group.spawn(prefix_set=class_dict.keys()))
    return groups


def build_models(groups: Mapping[str, RayWorkerGroup]) -> None:
    """Build the models of all roles; the rollout comes last, because it takes the memory that is left."""
    for name in ("critic", "ref", "rm", "actor_rollout"):
        if name in groups:
            with phase(f"init_model of {name}", step=0):
                groups[name].init_model()
            CLOCK.mark(f"init_{name}")


# ---- starting them before the data are loaded


def planned_steps(config: DictConfig, run: RunConfig, batches_per_epoch: int) -> int:
    """Return the number of training steps, and write it to both forms of the configuration."""
    steps = run.trainer.total_training_steps
    if steps is None:
        steps = updates_of(run, batches_per_epoch)
    set_schedule_steps(config, steps)
    run.set_total_training_steps(steps)
    if steps <= run.trainer.critic_warmup:
        words = "trainer.critic_warmup=%d: covers all %d steps, the actor is not trained"
        logger.warning(words, run.trainer.critic_warmup, steps)
    return steps


def set_schedule_steps(config: DictConfig, steps: int) -> None:
    """Write the number of steps to the keys that the learning-rate schedules of the workers read."""
    with open_dict(config):
        for key in ("actor_rollout_ref.actor.optim", "critic.optim", "reward_model.model.optim"):
            if OmegaConf.select(config, key) is not None:
                OmegaConf.update(config, f"{key}.total_training_steps", steps)


def steps_known_early(run: RunConfig) -> int | None:
    """Return the number of training steps if it is known without loading the data, else None."""
    data = run.data
    if run.trainer.total_training_steps is not None:
        return run.trainer.total_training_steps
    if data.filter_overlong_prompts or data.custom_cls.path or data.datagen.path or data.sampler.class_path:
        return None  # the number of rows changes
    import pyarrow.parquet as pq

    from verl.utils.dataset.files import localize

    files = localize(data.train_paths)
    if not all(path.endswith(".parquet") for path in files):
        return None
    rows = sum(pq.read_metadata(path).num_rows for path in files)
    most = data.most_rows(is_train=True)
    rows = rows if most < 0 else min(rows, most)
    return updates_of(run, int(rows) // data.loader_batch_size)


def updates_of(run: RunConfig, batches_per_epoch: int) -> int:
    """Return the number of training steps for which the data suffice, by the batches of one pass over them."""
    batches = batches_per_epoch * run.trainer.total_epochs
    if run.async_training.gathers_draws:  # a step gathers prompts of several draws
        return batches * run.data.loader_batch_size // run.prompts_per_step
    return batches


def take_steps_later(classes: Iterable[WorkerClass]) -> bool:
    """Whether these worker classes can be constructed before the number of training steps is known.

    The workers of the library can. The constructor of a worker in a user's fork of verl may read that number.
    """
    plain = (getattr(cls, "__ray_actor_class__", cls) for cls in classes)
    return all(
        hasattr(cls, "set_total_training_steps") and cls.__init__.__module__.startswith("verl.workers.roles.")  # type: ignore[misc]
        for cls in plain
    )


class WorkerStart:
    """Starts the worker processes in a thread, while the driver loads tokenizer and data."""

    def __init__(
        self, config: DictConfig, total_training_steps: int | None, start: Callable[[], dict[str, RayWorkerGroup]]
    ) -> None:
        """Begin ``start`` with ``config`` for the given number of steps; None means that the workers get it later."""
        self._config = config
        self._total_training_steps = total_training_steps
        self._groups: Future[dict[str, RayWorkerGroup]] = Future()
        # A daemon, unlike the threads of an executor: if loading the data fails, nobody waits for the workers.
        threading.Thread(target=settle, args=(self._groups, start), name="worker-start", daemon=True).start()

    def result(self, config: DictConfig, total_training_steps: int) -> dict[str, RayWorkerGroup] | None:
        """Wait for the processes and return their worker groups, if they are those of this configuration.

        Otherwise end them and return None: the trainer of a fork may have written to the configuration, and a data set
        may have another number of rows than its files.

        Raises: the error of the start.
        """
        groups = self._groups.result()
        if self._total_training_steps is None:
            set_schedule_steps(self._config, total_training_steps)
        key = _changed_key(_of_workers(self._config), _of_workers(config))
        if key is not None:
            logger.warning("the workers start again, because %s was changed after their start", key)
            kill_all([worker for group in groups.values() for worker in group.workers])
            return None
        if self._total_training_steps is None:
            for name, group in groups.items():
                with phase(f"start of {name}", step=0):
                    group.set_total_training_steps(total_training_steps)
        return groups


def _of_workers(config: DictConfig) -> JsonObject:
    """Return the nodes that workers get."""
    nodes = ("actor_rollout_ref", "critic", "reward_model")
    return {name: tree_of(config[name]) for name in nodes if config.get(name) is not None}


def _changed_key(before: Json, after: Json, key: str = "") -> str | None:
    """Return the first key whose values differ."""
    if not isinstance(before, Mapping) or not isinstance(after, Mapping):
        return None if before == after else key
    names = (str(name) for name in {**before, **after})
    found = (_changed_key(before.get(name), after.get(name), f"{key}.{name}".lstrip(".")) for name in names)
    return next((name for name in found if name is not None), None)


def start_workers_early(
    config: DictConfig, role_worker_mapping: WorkerClasses, pools: ResourcePoolManager, group_cls: type[RayWorkerGroup]
) -> WorkerStart | None:
    """Start the workers before the data are loaded; return None if they need a number of steps that is not known yet.

    The trainer, which may change the tree, does not exist yet, so this parses the tree for itself.
    """
    run = RunConfig.parse(config)
    steps = steps_known_early(run)
    if steps is not None:
        set_schedule_steps(config, steps)
    elif not take_steps_later(role_worker_mapping.values()):
        return None
    used = config.copy()
    start = partial(create_worker_groups, used, run, role_worker_mapping, pools, group_cls, run.trainer.device)
    return WorkerStart(used, steps, start)
