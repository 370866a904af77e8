"""The Megatron-Core training engine, on CUDA with NCCL and on the CPU with gloo."""

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel import get_forward_backward_func
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.models.mcore.gpt.export import exported_weights
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
from verl.utils.faults import fault_point
from verl.utils.fsdp_utils import scale_to_norm
from verl.utils.megatron.offload import Offload
from verl.utils.megatron.optimizer import (
    get_megatron_optimizer,
    get_megatron_optimizer_param_scheduler,
    init_megatron_optim_config,
)
from verl.workers.engine.accumulate import MetricSums, agree
from verl.workers.engine.base import BaseEngine, EngineRegistry, LossFn, ModelOutput
from verl.workers.engine.megatron.build import ModelBuilder, gather_weights, model_dtype, wrap
from verl.workers.engine.megatron.forward import Forward, Round, check_positions
from verl.workers.engine.megatron.layout import Layout, make_layout
from verl.workers.engine.megatron.sources import share_folder
from verl.workers.engine.micro_batch import MicroBatch, check_rows, cut, response_mask_of

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.config import CheckpointConfig, HFModelConfig, McoreEngineConfig, McoreOptimizerConfig

logger = logging.getLogger(__name__)

OutputFn = Callable[[ModelOutput, Round], Tensor]
"""Takes the output for a micro-batch on the last stage; returns what is differentiated."""


class MegatronEngine(BaseEngine):
    """A ``GPTModel`` with AdamW, laid out over tensor, pipeline, context and data parallel ranks.

    Rows are always packed. Every rank of a pipeline returns the outputs and metrics of its last stage.
    """

    is_value_model = False
    lead = 1  # a token is read where it is predicted
    makes_head = True
    load_weight = True

    def __init__(
        self,
        model_config: "HFModelConfig",
        engine_config: "McoreEngineConfig",
        optimizer_config: "McoreOptimizerConfig | None" = None,
        checkpoint_config: "CheckpointConfig | None" = None,
    ) -> None:
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = None if engine_config.forward_only else optimizer_config
        self.checkpoint_config = checkpoint_config
        self.optimizer: Any = None
        self.lr_scheduler: Any = None
        self.skipped_steps = 0
        self._version = 0
        self._checkpoint_manager: MegatronCheckpointManager | None = None
        self._depth = 0
        self._weights_are_shards = False
        self.layout: Layout
        self.offload: Offload

    # ---- start

    def initialize(self) -> None:
        """Build the model, optimizer and schedule, and load the pretrained weights."""
        config = self.engine_config
        self.layout = make_layout(config)
        if config.share_model_files and self.layout.world_size > 1:
            share_folder(self.model_config)
        self.hf_config = self.model_config.hf_config
        builder = ModelBuilder(
            self.model_config, config, self.layout, self.is_value_model, self.makes_head, self.load_weight
        )
        self.models = builder.build()
        self.module = self.models  # what runs: wrapped where it trains
        self.forward = Forward(
            self.layout,
            self.is_value_model,
            self.hf_config.vocab_size,
            self.models[0].config.sequence_parallel,
            self.lead,
            builder.fuses_head,
        )
        if self.optimizer_config is None:
            for model in self.models:
                model.requires_grad_(False)
        else:
            self.module = wrap(self.models, config)
            dtype = model_dtype(config, self.layout.device)
            settings = init_megatron_optim_config(self.optimizer_config, dtype, config.use_distributed_optimizer)
            self.optimizer = get_megatron_optimizer(self.module, settings)
            self.lr_scheduler = get_megatron_optimizer_param_scheduler(self.optimizer, self.optimizer_config)
        self.offload = Offload(self.module, self.optimizer, self.layout.device)
        self._set_training(False)
        self._unload()

    # ---- modes

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Hold parameters, gradients and optimizer state on the device, dropout on."""
        with self._on_device("model", "grad", "optimizer"):
            self._set_training(True)
            try:
                yield
                self._gather_weights()  # not after an error, when other ranks may not come
            finally:
                self.optimizer_zero_grad()
                self._set_training(False)

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Hold parameters on the device, dropout off."""
        with self._on_device("model"):
            self._set_training(False)
            yield

    def _set_training(self, mode: bool) -> None:
        for module in self.module:
            module.train(mode)

    # ---- offload

    @contextmanager
    def _on_device(self, *parts: str) -> Iterator[None]:
        """Hold parts on the device until the outermost of these contexts ends."""
        for part in parts:
            self.offload.load(part)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                self._unload()

    def _unload(self) -> None:
        config = self.engine_config
        self.to("cpu", model=config.param_offload, optimizer=config.optimizer_offload, grad=config.grad_offload)

    def to(self, device: str, model: bool = True, optimizer: bool = True, grad: bool = True) -> None:
        """Move parts away to the host by ``cpu``, or back by ``device`` or the name of the device.

        On a CPU worker ``cpu`` is away, too. A mode brings back what it needs.

        Raises: ValueError for another device.
        """
        away = torch.device(device).type == "cpu" if device != "device" else False
        if not away and device != "device" and torch.device(device).type != self.layout.device.type:
            raise ValueError(f"the Megatron engine cannot move to {device!r}: write cpu or {self.layout.device.type}")
        for part, wanted in (("model", model), ("grad", grad), ("optimizer", optimizer)):
            if wanted:
                (self.offload.unload if away else self.offload.load)(part)

    # ---- forward and backward

    def forward_backward_batch(
        self, data: "DataProto", loss_fn: LossFn, forward_only: bool = False
    ) -> dict[str, float]:
        """Accumulate the gradient of a mini-batch without a step, or only its metrics.

        The gradient is that of the loss over the global mini-batch, whatever the cut and the layout.
        """
        micro_batches = self._cut(data)
        units, rounds = agree(response_mask_of(data), len(micro_batches), self.layout.shares)
        metrics = MetricSums()

        def loss_of(output: ModelOutput, round_: Round) -> Tensor:
            assert round_.rows is not None
            terms, values = loss_fn(output, round_.rows)
            metrics.add(values)
            return torch.stack([term.total.float() / units[term.unit] for term in terms]).sum()

        self._run(data.meta_info, micro_batches, rounds, loss_of, forward_only)
        reduced = metrics.reduce(units, self.layout.shares) if self.layout.is_last_stage else {}
        return self._from_last_stage(reduced)

    def infer_batch(self, data: "DataProto") -> ModelOutput:
        """Run the model without gradient; outputs are (B, R) on the CPU, in the order of the rows."""
        micro_batches = self._cut(data)
        rounds = agree(None, len(micro_batches), self.layout.shares)[1]
        parts: list[tuple[list[int], ModelOutput]] = []

        def keep(output: ModelOutput, round_: Round) -> Tensor:
            assert round_.micro_batch is not None
            parts.append((round_.micro_batch.index, {name: value.cpu() for name, value in output.items()}))
            return torch.zeros((), device=self.layout.device)

        self._run(data.meta_info, micro_batches, rounds, keep, forward_only=True)
        if not self.layout.is_last_stage:
            return self._from_last_stage({})
        order = torch.tensor([i for index, _ in parts for i in index]).argsort()
        whole = {name: torch.cat([output[name] for _, output in parts])[order] for name in parts[0][1]}
        return self._from_last_stage(whole)

    def _cut(self, data: "DataProto") -> list[MicroBatch]:
        check_rows(data, self.lead)
        check_positions(data)
        return cut(data, self.layout.cp_size)

    def _run(
        self,
        meta: dict[str, Any],
        micro_batches: list[MicroBatch],
        rounds: int,
        use: OutputFn,
        forward_only: bool,
    ) -> None:
        """Drive the pipeline schedule over ``rounds`` micro-batches, those that this rank lacks being empty."""
        needed = ("model",) if forward_only else ("model", "grad")
        if away := [part for part in needed if self.offload.is_away(part)]:
            raise RuntimeError(f"the engine's {' and '.join(away)} is offloaded: enter train_mode or eval_mode first")
        if self.layout.virtual_stages > 1:  # the interleaved schedule wants whole groups of micro-batches
            rounds = -(-rounds // self.layout.pp_size) * self.layout.pp_size

        def batches() -> Iterator[Round]:
            for at in range(rounds):
                yield self.forward.prepare(at, micro_batches[at] if at < len(micro_batches) else None)

        def step(iterator: Iterator[Round], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            round_ = next(iterator)
            chunk = model.module if model not in self.models else model
            output = self.forward.run(model, chunk, round_, meta)
            if round_.at == 0 and meta.get("fault_point"):
                fault_point(meta["fault_point"], rank=self.layout.rank, step=meta.get("global_steps"))
            return output, partial(self._finish, round_=round_, meta=meta, use=use)

        chunks = len(self.module)
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[batches() for _ in range(chunks)] if chunks > 1 else batches(),
                model=self.module,
                num_microbatches=rounds,
                seq_length=1,  # lengths vary: the stages tell each other
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def _finish(
        self, found: Tensor, round_: Round, meta: dict[str, Any], use: OutputFn
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Turn what the head gave into what is differentiated; a count of tokens that nothing reads."""
        if round_.micro_batch is None:
            result = found.sum() * 0.0
        else:
            result = use(self.forward.outputs(found, round_, meta), round_)
        return result, torch.zeros((), dtype=torch.int, device=self.layout.device), {}

    def _from_last_stage(self, value: Any) -> Any:
        """Return what the last stage of this pipeline holds, on all of its ranks; collective."""
        if self.layout.pp_size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=self.layout.last_stage_rank, group=self.layout.pp_group)
        return box[0]

    def train_batch(self, data: "DataProto", loss_fn: LossFn) -> dict[str, float]:
        """Take one optimizer step on a mini-batch.

        Returns: the metrics of ``loss_fn`` over the global mini-batch, equal on every rank, and ``grad_norm``; also
        ``skipped_steps``, the count so far, once a step had a non-finite norm.
        """
        self.optimizer_zero_grad()
        metrics = self.forward_backward_batch(data, loss_fn)
        metrics["grad_norm"] = self.optimizer_step()
        if self.skipped_steps:
            metrics["skipped_steps"] = float(self.skipped_steps)
        return metrics

    # ---- optimizer

    def optimizer_zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        if self.optimizer is None or self.offload.is_away("grad"):
            return
        for module in self.module:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def optimizer_step(self) -> float:
        """Clip and apply the gradient; returns its norm. A step with a non-finite norm is skipped."""
        if self.optimizer is None or self.optimizer_config is None:
            raise RuntimeError("this engine was built to infer: it has no optimizer (megatron.forward_only)")
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        if not math.isfinite(norm):
            self.skipped_steps += 1
            logger.warning("the gradient norm is not finite: optimizer step skipped, %d so far", self.skipped_steps)
        else:
            parameters = [p for each in self.optimizer.chained_optimizers for p in each.get_parameters()]
            grads = [_grad_of(p) for p in parameters]
            scale_to_norm([grad for grad in grads if grad is not None], norm, self.optimizer_config.clip_grad)
            self.optimizer.step_with_ready_grads()
            self._version += 1
            self._weights_are_shards = True
        self.optimizer_zero_grad()
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the learning rate that the last optimizer step used."""
        if self.lr_scheduler is None:
            raise RuntimeError("this engine was built to infer: it has no schedule (megatron.forward_only)")
        used = float(self.lr_scheduler.get_lr({}))
        self.lr_scheduler.step(1)
        return used

    # ---- weights

    def _gather_weights(self) -> None:
        """Finish the last step where ``overlap_param_gather`` leaves that to a forward pass; collective."""
        if self._weights_are_shards:
            with self._on_device("model"):
                gather_weights(self.module)
            self._weights_are_shards = False

    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) of this rank's part of the model, chunk by chunk."""
        for chunk, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{chunk}.{name}", self.offload.value_of(parameter)

    @property
    def weights_version(self) -> int:
        """Count the changes of the weights: optimizer steps and loaded checkpoints."""
        return self._version

    def named_weights(
        self, adapter_only: bool = False, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) in a fixed order, one parameter's tensors alive at a time.

        Collective: every rank drains it. ``before`` is told the bytes of each parameter before it is gathered.
        """
        if adapter_only:
            raise RuntimeError("the engine holds no adapter: model.lora_rank is 0")
        self._gather_weights()
        value_of = self.offload.value_of  # of what is offloaded one tensor at a time moves to the device
        yield from exported_weights(self.models, self.hf_config, self.is_value_model, self.layout, value_of, before)

    # ---- checkpoints

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint; collective."""
        with self._on_device("model", "optimizer"):
            self._gather_weights()
            self.checkpoint_manager.save_checkpoint(
                local_path=local_path,
                hdfs_path=hdfs_path,
                global_step=global_step,
                max_ckpt_to_keep=max_ckpt_to_keep,
                named_weights=self.named_weights(),
            )

    def keep_latest_checkpoints(self, local_path: str, max_ckpt_to_keep: int | None) -> None:
        """Remove the oldest complete checkpoints, so that so many are left with the one at ``local_path``."""
        self.checkpoint_manager.keep_latest(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore this rank's part of a checkpoint, whatever layout wrote it; collective."""
        with self._on_device("model", "optimizer"):
            self.checkpoint_manager.load_checkpoint(
                local_path=local_path, hdfs_path=hdfs_path, del_local_after_load=del_local_after_load
            )
        self._version += 1

    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Complete an asynchronous save; returns whether none is left. Collective."""
        return self._checkpoint_manager is None or self._checkpoint_manager.finish_checkpoint(wait)

    @property
    def checkpoint_manager(self) -> MegatronCheckpointManager:
        """Writes and reads what ``checkpoint_config`` names."""
        if self._checkpoint_manager is None:
            config = self.model_config
            self._checkpoint_manager = MegatronCheckpointManager(
                model=self.models,
                hf_config=self.hf_config,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                processing_class=config.get_processor() if hasattr(config, "get_processor") else None,
                checkpoint_config=self.checkpoint_config,
                source_dtype=self.hf_config.dtype,
                source_folder=getattr(config, "local_path", None),
            )
        return self._checkpoint_manager

    # ---- layout

    def get_data_parallel_rank(self) -> int:
        """Return which shard of a batch this rank takes."""
        return self.layout.dp_rank

    def get_data_parallel_size(self) -> int:
        """Return into how many shards a batch is cut."""
        return self.layout.dp_size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Return the ranks that hold the other shards; None where there is one."""
        return self.layout.dp_group if self.layout.dp_size > 1 else None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are the ones collected."""
        return self.layout.is_last_stage and self.layout.tp_rank == 0 and self.layout.cp_rank == 0


def _grad_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient that is applied: ``use_precision_aware_optimizer`` keeps it in a place of its own."""
    own: Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if own is None else own


@EngineRegistry.register("language_model", "megatron", ["cuda", "cpu"])
class MegatronEngineWithLMHead(MegatronEngine):
    """A policy: log-probabilities, and entropies where asked for."""


@EngineRegistry.register("value_model", "megatron", ["cuda", "cpu"])
class MegatronEngineWithValueHead(MegatronEngine):
    """A critic: one value at the position that predicts each token."""

    is_value_model = True


@EngineRegistry.register("reward_model", "megatron", ["cuda", "cpu"])
class MegatronEngineWithScoreHead(MegatronEngineWithValueHead):
    """A reward model: one value at each token itself, by a head that the checkpoint holds."""

    lead = 0
    makes_head = False
