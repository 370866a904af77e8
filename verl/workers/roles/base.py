"""What the roles share: process group, seeds, engine construction, checkpoints and figures of the machine."""

import dataclasses
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import psutil

from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.base.profiling import DistProfilerExtension
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.device import get_torch_device, is_cuda_available, is_npu_available
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.flops_counter import FlopsCounter
from verl.utils.megatron.ranks import place_of
from verl.utils.metric import reduce_metrics
from verl.utils.numerics.seeding import seed_process
from verl.utils.observe.digest import random_state_digest, weights_digest
from verl.utils.profiler.profile import DistProfiler, RoleProfilers
from verl.utils.profiler.ranges import captured_range
from verl.utils.py_functional import append_to_dict
from verl.workers.engine import BaseEngine, EngineRegistry
from verl.workers.roles.accounting import INFERENCE, accounted

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from verl.protocol import DataProto
    from verl.workers.config import (
        CheckpointConfig,
        FSDPEngineConfig,
        HFModelConfig,
        McoreEngineConfig,
        OptimizerConfig,
    )

    AnyEngineConfig = FSDPEngineConfig | McoreEngineConfig

logger = logging.getLogger(__name__)

_GIB = 1024**3
_NOT_OF_A_STEP = ("init_model", "load_checkpoint", "report_step")


class EngineWorker(Worker, DistProfilerExtension):
    """A worker around one training engine; a role says which model, loss and batches."""

    engine: BaseEngine

    def __init__(self, timeout_s: int) -> None:
        super().__init__()
        initialize_global_process_group_ray(timeout_second=timeout_s)
        self._weights_digest: tuple[int, str] | None = None
        self.flops_counters: dict[int, FlopsCounter] = {}

    def register_mesh(self, name: str, group_size: int) -> None:
        """Let ``group_size`` neighbouring ranks take the same shard, and the first of them answer."""
        self._register_dispatch_collect_info(name, self.rank // group_size, self.rank % group_size == 0)

    def register_engine_mesh(self, name: str, engine: "AnyEngineConfig | DictConfig", sp_size: int = 1) -> None:
        """Let the ranks that share a shard in the layout of an engine take it, and one of them answer.

        ``sp_size`` is the sequence parallelism of FSDP, which has no other axis that shares rows.
        """
        if getattr(engine, "strategy", None) == "megatron":
            place = place_of(self.rank, self.world_size, engine)
            self._register_dispatch_collect_info(name, place.dp_rank, place.holds_outputs)
        else:
            self.register_mesh(name, sp_size)

    def use_profilers(self, **nodes: Any) -> None:
        """Profile the roles that this worker plays by their nodes; the first role is the one that trains."""
        configs = {role: omega_conf_to_dataclass(node) for role, node in nodes.items()}
        self.profiler = RoleProfilers(
            {role: DistProfiler(self.rank, config, role=role) for role, config in configs.items()}
        )

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def dump_memory_snapshot(self, tag: str = "manual", sub_dir: str | None = None) -> None:
        """Write a snapshot of the allocator, on the ranks that record one."""
        for profiler in self.profiler.profilers.values() if self.profiler is not None else ():
            if profiler.dump_memory_snapshot(tag, sub_dir):
                return

    def build_engine(
        self,
        model_type: str,
        model_config: "HFModelConfig",
        engine_config: "AnyEngineConfig",
        optimizer_config: "OptimizerConfig | None",
        checkpoint_config: "CheckpointConfig",
        freeze_vision_tower: bool = False,
        load_weight: bool = True,
    ) -> BaseEngine:
        """Construct and initialize an engine for the strategy of its configuration, and seed this process for it.

        Without ``load_weight``, which is of Megatron-Core, its weights come from a seed.
        """
        engine = EngineRegistry.new(
            model_type,
            engine_config.strategy,
            model_config=model_config,
            engine_config=engine_config,
            optimizer_config=optimizer_config,
            checkpoint_config=checkpoint_config,
        )
        engine.freeze_vision_tower, engine.load_weight = freeze_vision_tower, load_weight
        engine.initialize()
        drawing = optimizer_config is not None or not self.flops_counters  # a reference beside an actor draws nothing
        if drawing and engine_config.strategy != "megatron":  # which has seeded it by the place in its layout
            seed_process(engine_config.seed, model_type, self.rank)
        num_outputs = None if model_type == "language_model" else 1
        counter = FlopsCounter(model_config.hf_config, num_outputs, freeze_vision_tower, engine.adapter_sizes)
        self.flops_counters[id(engine)] = counter
        return engine

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def report_step(self, digests: bool) -> dict[str, Any]:
        """Return what the record of the run keeps of this rank since the last report.

        ``seconds`` in each method that the driver has called (waiting for other ranks included, but in
        ``generation``), ``memory`` of this process in GiB, what its engine has generated last (``generation``) and,
        where asked for, ``digests`` of its weights and of its random state.
        """
        calls, self.seconds_by_call = self.seconds_by_call, {}
        seconds = {call: spent for call, spent in calls.items() if call[0] != "_" and call not in _NOT_OF_A_STEP}
        memory = {"host_gb": psutil.Process().memory_info().rss / _GIB}
        if is_cuda_available or is_npu_available:
            memory["device_gb"] = get_torch_device().memory_allocated() / _GIB
        report = {"rank": self.rank, "seconds": seconds, "memory": memory}
        generation = getattr(getattr(self, "rollout", None), "last_generation", None)
        if generation:
            report["generation"] = generation
        if digests:
            report["digests"] = {"random_state": random_state_digest()} | self._digest_of_weights()
        return report

    def _digest_of_weights(self) -> dict[str, str]:
        """Return the digest of this rank's part of the weights, made anew where they have changed."""
        engine = getattr(self, "engine", None)
        if engine is None:  # a judge generates and trains nothing
            return {}
        if self._weights_digest is None or self._weights_digest[0] != engine.weights_version:
            self._weights_digest = engine.weights_version, weights_digest(engine.local_parameters())
        return {"weights": self._weights_digest[1]}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint."""
        self.engine.save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Complete a save that goes on beside training; returns whether none is left."""
        return self.engine.finish_checkpoint(wait)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def keep_latest_checkpoints(self, local_path: str, max_ckpt_to_keep: int | None) -> None:
        """Remove the oldest complete checkpoints of this node, so that so many are left with the one at a path."""
        self.engine.keep_latest_checkpoints(local_path, max_ckpt_to_keep)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore this rank's part of a checkpoint."""
        self.engine.load_checkpoint(local_path, hdfs_path, del_local_after_load)

    def train_mini_batches(
        self,
        data: "DataProto",
        mini_batch_size: int,
        epochs: int,
        shuffle: bool,
        loss_fn: Any,
        prepare: "Callable[[DataProto, int], None] | None" = None,
        seed: int | None = None,
    ) -> list[dict[str, float]]:
        """Take one optimizer step per mini-batch and pass; returns the metrics of each.

        ``prepare`` is called with each mini-batch, right before its step, and the number of the pass; ``seed`` is
        added to the number of the step where rows are shuffled.
        """
        batches = data.make_iterator(
            mini_batch_size=mini_batch_size,
            epochs=epochs,
            seed=data.meta_info.get("global_steps", 0) + (seed or 0),
            dataloader_kwargs={"shuffle": shuffle},
        )
        metrics = []
        for at, mini_batch in enumerate(batches):
            if prepare is not None:
                prepare(mini_batch, at * mini_batch_size // len(data))
            with captured_range(f"mini_batch {at}"):
                metrics.append(self.engine.train_batch(mini_batch, loss_fn))
            if self.profiler is not None:
                self.profiler.step()
        return metrics

    def accounted(
        self,
        metrics: dict[str, Any],
        phase: str,
        data: "DataProto",
        passes: float = INFERENCE,
        engine: BaseEngine | None = None,
    ) -> AbstractContextManager[None]:
        """Add to ``metrics`` what a task of this worker uses, by default forward passes of its own engine."""
        counter = self.flops_counters.get(id(self.engine if engine is None else engine))
        return accounted(metrics, phase, data, passes, counter, self.world_size)


def effective_engine_config(engine: Any, node: Any, **overrides: Any) -> Any:
    """Return the node of a role's engine with ``overrides``.

    Keys that stand both in the role's node and in its ``fsdp_config`` are merged: the role's node wins where it was
    changed from its default.
    """
    if engine.strategy == "megatron":
        return dataclasses.replace(engine, **overrides)
    values: dict[str, Any] = {"strategy": node.strategy}
    for name, default in _SHARED_KEYS.items():
        own = node.get(name, default)
        values[name] = own if own != default else getattr(engine, name)
    return dataclasses.replace(engine, **(values | overrides))


_SHARED_KEYS: dict[str, Any] = {
    "ulysses_sequence_parallel_size": 1,
    "entropy_from_logits_with_chunking": False,
    "entropy_checkpointing": False,
    "use_torch_compile": True,
}


def average_metrics(per_step: list[dict[str, float]], prefix: str) -> dict[str, float]:
    """Average the metrics of the optimizer steps; maxima and minima stay such. See ``list_metrics`` for the names."""
    return reduce_metrics(list_metrics(per_step, prefix))


def list_metrics(per_step: list[dict[str, float]], prefix: str) -> dict[str, list[float]]:
    """Return the values of all optimizer steps by name. The engine's own names (those without a section) get the
    role's ``prefix``.
    """
    values: dict[str, list[float]] = {}
    for step in per_step:
        append_to_dict(values, {name if "/" in name else prefix + name: value for name, value in step.items()})
    return values
