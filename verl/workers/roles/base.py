"""The base of the roles: process group, seeds, engine construction, checkpoints and reports."""

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, open_dict

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.worker import DistProfilerExtension
from verl.utils.device import get_device_name
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.faults import fault_point
from verl.utils.flops_counter import FlopsCounter
from verl.utils.megatron.ranks import place_of
from verl.utils.memory_utils import keep_freed_host_memory
from verl.utils.metric import reduce_metrics
from verl.utils.numerics.seeding import seed_process
from verl.utils.observe import timeline
from verl.utils.observe.digest import random_state_digest, weights_digest
from verl.utils.profiler.config import ProfilerConfig
from verl.utils.profiler.profile import DistProfiler, RoleProfilers
from verl.utils.profiler.ranges import captured_range
from verl.utils.py_functional import append_to_dict
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, McoreEngineConfig, RewardModelConfig
from verl.workers.config.actor_critic import FSDPActorConfig, FSDPCriticConfig, McoreActorConfig, McoreCriticConfig
from verl.workers.config.actor_rollout_ref import FSDPRefConfig, McoreRefConfig
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.engine.base import LossFn
from verl.workers.engine.passes import PassSpec
from verl.workers.roles.accounting import INFERENCE, accounted, memory_in_use
from verl.workers.roles.batching import BatchInfo, mini_batches_of, rows_of_step

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.config import HFModelConfig, OptimizerConfig

AnyEngineConfig = FSDPEngineConfig | McoreEngineConfig
AnyTrainedConfig = FSDPActorConfig | McoreActorConfig | FSDPCriticConfig | McoreCriticConfig
EngineRoleConfig = FSDPActorConfig | McoreActorConfig | FSDPRefConfig | McoreRefConfig
RoleConfig = AnyTrainedConfig | FSDPRefConfig | McoreRefConfig | RewardModelConfig

_NOT_OF_A_STEP = ("init_model", "set_total_training_steps", "load_checkpoint", "report_step", "start_timeline")


class EngineWorker(Worker, DistProfilerExtension):
    """A worker around one training engine; a role says which model, loss and batches.

    ``rows_per_step`` counts the rows of this rank in one optimizer step, for a role that trains.
    """

    rows_per_step: int

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._engine: BaseEngine | None = None
        if get_device_name() == "cpu":
            keep_freed_host_memory()  # each step allocates activations and gradients again
        initialize_global_process_group_ray(timeout_second=timeout_s)
        self._weights_digest: tuple[int, str] | None = None
        self.flops_counters: dict[int, FlopsCounter] = {}

    @property
    def engine(self) -> BaseEngine:
        """The engine of the model that this role trains or infers with.

        Raises: RuntimeError before ``init_model``, and for a worker that only generates.
        """
        if self._engine is None:
            raise RuntimeError(
                f"{type(self).__name__} has no training engine: call init_model, with a role that has one"
            )
        return self._engine

    @engine.setter
    def engine(self, engine: BaseEngine) -> None:
        self._engine = engine

    def register_mesh(self, name: str, group_size: int) -> None:
        """Register a mesh in which ``group_size`` neighbouring ranks get the same shard, and the first one answers."""
        self._register_dispatch_collect_info(name, self.rank // group_size, self.rank % group_size == 0)

    def register_engine_mesh(self, name: str, config: RoleConfig) -> None:
        """Register a mesh in which ranks that share rows in an engine's layout get the same shard, and one answers."""
        engine = engine_config_of(config)
        if isinstance(engine, FSDPEngineConfig):
            self.register_mesh(name, engine.ulysses_sequence_parallel_size)
        else:
            place = place_of(self.rank, self.world_size, engine)
            self._register_dispatch_collect_info(name, place.dp_rank, place.holds_outputs)

    def use_profilers(self, **configs: ProfilerConfig | None) -> None:
        """Profile the roles of this worker; the first role is the one that trains."""
        self.profiler = RoleProfilers(
            {role: DistProfiler(self.rank, config, role=role) for role, config in configs.items()}
        )

    @property
    def optimizer_nodes(self) -> "list[OptimizerConfig | DictConfig]":
        """The role's optimizer nodes, in typed and untyped form if a subclass might read either."""
        return []

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def set_total_training_steps(self, steps: int) -> None:
        """Set the length of the learning-rate schedules; call it before ``init_model``, if the run did not know it."""
        for node in self.optimizer_nodes:
            with open_dict(node) if isinstance(node, DictConfig) else nullcontext():
                node.total_training_steps = steps

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def dump_memory_snapshot(self, tag: str = "manual", sub_dir: str | None = None) -> None:
        """Write a snapshot of the allocator, on the ranks that record one."""
        if isinstance(self.profiler, RoleProfilers):
            for profiler in self.profiler.profilers.values():
                if profiler.dump_memory_snapshot(tag, sub_dir):
                    return

    def build_engine(
        self,
        model_type: str,
        model_config: "HFModelConfig",
        config: RoleConfig,
        freeze_vision_tower: bool = False,
        initialize: bool = True,
        rope_length: int | None = None,
    ) -> BaseEngine:
        """Construct and initialize the engine of a role's node, and seed this process for it.

        Without ``initialize`` the engine has no model, and the caller passes one to ``adopt``. With Megatron-Core and
        without ``load_weight``, the weights come from a seed.
        """
        engine_config = engine_config_of(config)
        trained = config if isinstance(config, AnyTrainedConfig) else None
        # The spec promises engines only the four keywords below. A user's engine may lack the three options, so each is
        # passed only if it differs from its default.
        options: dict[str, bool | int] = {"freeze_vision_tower": True} if freeze_vision_tower else {}
        if rope_length is not None:
            options["rope_length"] = rope_length
        if not isinstance(config, FSDPActorConfig | FSDPCriticConfig | FSDPRefConfig) and not config.load_weight:
            options["load_weight"] = False
        engine = EngineRegistry.new(
            model_type,
            engine_config.strategy,
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=trained.optimizer() if trained else None,
            checkpoint_config=trained.checkpoint if trained else CheckpointConfig(),
            **options,
        )
        if initialize:
            engine.initialize()
        # A reference next to an actor draws nothing. Megatron-Core has seeded the process by its place in the layout.
        if (trained or not self.flops_counters) and engine_config.strategy != "megatron":
            seed_process(engine_config.seed, model_type, self.rank)
        num_outputs = None if model_type == "language_model" else 1
        counter = FlopsCounter(model_config.hf_config, num_outputs, freeze_vision_tower, engine.adapter_sizes)
        self.flops_counters[id(engine)] = counter
        return engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def start_timeline(self) -> None:
        """Record the spans of this process until the next ``report_step``, for the timeline of the step."""
        timeline.start()

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def report_step(self, digests: bool) -> dict[str, Any]:
        """Return this rank's part of the run's record since the last report.

        ``seconds`` are those in each method that the driver has called. They include waiting for other ranks, except
        in ``generation``. ``memory`` is that of this process in GiB, and ``generation`` describes the last one. With
        ``digests`` there are digests of the weights and of the random state. ``timeline`` holds what the process did
        since ``start_timeline``; of several workers in a process, the first one reports it.
        """
        calls = self.seconds_by_call
        self.seconds_by_call = {}
        seconds = {call: spent for call, spent in calls.items() if call[0] != "_" and call not in _NOT_OF_A_STEP}
        report = {"rank": self.rank, "seconds": seconds, "memory": memory_in_use()}
        if generation := self._last_generation():
            report["generation"] = generation
        if (part := timeline.take(f"rank {self.rank}")) is not None:
            report["timeline"] = part
        if digests:
            report["digests"] = {"random_state": random_state_digest()} | self._digest_of_weights()
        return report

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def weights_digest(self) -> str | None:
        """Return a digest of this rank's part of the weights; None for a worker that does not train."""
        return self._digest_of_weights().get("weights")

    def _last_generation(self) -> dict[str, float]:
        """Describe the last generation; empty for a worker that does not generate."""
        return {}

    def _digest_of_weights(self) -> dict[str, str]:
        """Return the digest of this rank's part of the weights, computed again only if they have changed."""
        engine = self._engine
        if engine is None:  # a generative reward model has no training engine
            return {}
        if self._weights_digest is None or self._weights_digest[0] != engine.weights_version:
            self._weights_digest = (engine.weights_version, weights_digest(engine.local_parameters()))
        return {"weights": self._weights_digest[1]}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint."""
        self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Complete an asynchronous save; returns whether none is left."""
        return self.engine.finish_checkpoint(wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_latest_checkpoints(self, local_path: str, max_ckpt_to_keep: int | None) -> None:
        """Keep the newest ``max_ckpt_to_keep`` complete checkpoints of this node, the one at a path included."""
        self.engine.keep_latest_checkpoints(local_path, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore this rank's part of a checkpoint."""
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def update(
        self,
        role: str,
        data: "DataProto",
        config: AnyTrainedConfig,
        loss_fn: LossFn,
        spec: PassSpec,
        prepare: "Callable[[DataProto, int, PassSpec], None] | None" = None,
    ) -> dict[str, float]:
        """Take one optimizer step per mini-batch and epoch; returns the metrics, averaged over the steps.

        ``prepare(mini_batch, epoch, spec)`` is called right before each step. Rows are shuffled by the seed of the
        node plus the number of the step.
        """
        step = BatchInfo.of(data).step
        fault = partial(fault_point, f"update_{role}", rank=self.rank, step=step)
        spec = dataclasses.replace(spec, after_first_forward=fault)
        rows = rows_of_step(data, self.rows_per_step, self.engine.get_data_parallel_size())
        metrics: dict[str, float] = {}
        steps = []
        with self.accounted(metrics, role, data, config.ppo_epochs), self.engine.train_mode():
            for at, mini_batch in enumerate(mini_batches_of(data, config, rows, step or 0)):
                if prepare is not None:
                    prepare(mini_batch, at * rows // len(data), spec)
                with captured_range(f"mini_batch {at}"):
                    steps.append(self.engine.train_batch(mini_batch, loss_fn, spec))
                if self.profiler is not None:
                    self.profiler.step()
            metrics[f"{role}/lr"] = self.engine.lr_scheduler_step()
        return metrics | reduce_metrics(list_metrics(steps, prefix=f"{role}/"))

    def accounted(
        self,
        metrics: dict[str, float],
        phase: str,
        data: "DataProto",
        passes: float = INFERENCE,
        engine: BaseEngine | None = None,
    ) -> AbstractContextManager[None]:
        """Add to ``metrics`` the time and memory of a task, by default of forward passes of the worker's engine."""
        used = self.engine if engine is None else engine
        return accounted(metrics, phase, data, passes, self.flops_counters.get(id(used)), self.world_size, used)


def engine_config_of(config: RoleConfig) -> AnyEngineConfig:
    """Return the node of the engine as a role uses it: one that does not train is ``forward_only``.

    Some keys of ``fsdp_config`` stand in the role's node, too. The role's value wins if it is not the default. On an
    accelerator, the weights of a reward model are held in the dtype of the compute, since they do not learn.

    Raises: TypeError for a node that holds no engine.
    """
    engine = config.engine
    if not isinstance(engine, FSDPEngineConfig | McoreEngineConfig):
        raise TypeError(f"{type(config).__name__} holds no fsdp_config or megatron node: use the config of a strategy")
    forward_only = engine.forward_only or not isinstance(config, AnyTrainedConfig)
    if isinstance(engine, McoreEngineConfig):
        return dataclasses.replace(engine, forward_only=forward_only)
    values: dict[str, Any] = {"strategy": config.strategy, "forward_only": forward_only}
    for name, default in _SHARED_KEYS.items():
        if name in config and config[name] != default:
            values[name] = config[name]
    if isinstance(config, RewardModelConfig) and get_device_name() != "cpu" and not engine.mixed_precision:
        values["model_dtype"] = "bf16"
    return dataclasses.replace(engine, **values)


_SHARED_KEYS: dict[str, int | bool] = {
    "ulysses_sequence_parallel_size": 1,
    "entropy_from_logits_with_chunking": False,
    "entropy_from_logits_chunk_size": 2048,
    "entropy_checkpointing": False,
    "use_torch_compile": True,
}


def list_metrics(per_step: list[dict[str, float]], prefix: str) -> dict[str, list[float]]:
    """Return the values of all optimizer steps by name; names without a section get the role's ``prefix``."""
    values: dict[str, list[float]] = {}
    for step in per_step:
        append_to_dict(values, {name if "/" in name else prefix + name: value for name, value in step.items()})
    return values
