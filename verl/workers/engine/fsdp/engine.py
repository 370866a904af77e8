"""The FSDP training engine: one implementation for both strategies, for one process or many, on every device."""

import dataclasses
import logging
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.fsdp import FSDPModule

from verl.models.transformers.dense_common import has_fused_head
from verl.models.transformers.vision import install_vision, uses_media
from verl.utils.device import get_torch_device
from verl.utils.faults import fault_point
from verl.utils.fsdp_utils import full_tensor, gradient_norm, local_gradients, move_optimizer_state, scale_to_norm
from verl.workers.engine.accumulate import MetricSums, agree
from verl.workers.engine.base import BaseEngine, EngineRegistry, LossFn, ModelOutput
from verl.workers.engine.fsdp import adapters
from verl.workers.engine.fsdp.build import ModelBuilder, precision_policy, use_packed_attention
from verl.workers.engine.fsdp.forward import Forward, ForwardOptions, Reference, sequence_parallel
from verl.workers.engine.fsdp.layout import Layout, check_layout, current_device, make_layout
from verl.workers.engine.fsdp.optim import build_optimizer, build_scheduler
from verl.workers.engine.fsdp.weights import checkpoint_names
from verl.workers.engine.micro_batch import MicroBatch, check_rows, cut, response_mask_of

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig

logger = logging.getLogger(__name__)

ACCUMULATION_BUDGET_BYTES = 2 << 30
"""Whole gradients and weights are kept between micro-batches where they fit; else each micro-batch reduces them."""


class FSDPEngine(BaseEngine):
    """A transformers model with AdamW, sharded by ``fully_shard`` where there is more than one rank."""

    is_value_model = False
    lead = 1  # a token is read where it is predicted
    makes_head = True

    def __init__(
        self,
        model_config: "HFModelConfig | None",
        engine_config: "FSDPEngineConfig",
        optimizer_config: "FSDPOptimizerConfig | None" = None,
        checkpoint_config: "CheckpointConfig | None" = None,
    ) -> None:
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = None if engine_config.forward_only else optimizer_config
        self.checkpoint_config = checkpoint_config
        self.optimizer: torch.optim.Optimizer | None = None
        self.lr_scheduler: Any = None
        self.skipped_steps = 0
        self._version = 0
        self.layout: Layout

    # ---- start

    def initialize(self) -> None:
        """Build the model, optimizer and schedule, and load the pretrained weights."""
        assert self.model_config is not None
        config = self.engine_config
        must_wrap = config.offload_policy or precision_policy(config, current_device()) is not None
        self.layout = make_layout(config, must_wrap)
        builder = ModelBuilder(self.model_config, config, self.layout, self.is_value_model, self.makes_head)
        builder.freeze_vision_tower = self.freeze_vision_tower
        self.module = builder.build()
        self.adapter_sizes = builder.adapter_sizes
        model = self.model_config
        self._adopt(model.use_remove_padding, offload_activations=getattr(model, "enable_activation_offload", False))
        if self.optimizer_config is not None:
            self.optimizer = build_optimizer(self._parameters, self.optimizer_config)
            self.lr_scheduler = build_scheduler(self.optimizer, self.optimizer_config)
        self.module.eval()
        self._offload()

    @classmethod
    def from_module(
        cls,
        module: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        *,
        remove_padding: bool,
        engine_config: "FSDPEngineConfig",
        optimizer_config: "FSDPOptimizerConfig | None" = None,
    ) -> Self:
        """Return an engine around a transformers model and an optimizer that the caller has built, sharded by
        ``fully_shard`` where there are several ranks. It trains, infers and yields weights; the caller owns offload,
        schedule and checkpoints.

        Raises: ValueError when the ranks do not share the module as ``fsdp_config`` says, or the module knows no
        packed sequences.
        """
        settings = dataclasses.replace(engine_config, param_offload=False, optimizer_offload=False)
        engine = cls(None, settings, optimizer_config)
        engine.layout = make_layout(settings, must_wrap=isinstance(module, FSDPModule))
        check_layout(module, engine.layout)
        if remove_padding:
            use_packed_attention(module)
        elif engine.layout.sp_size > 1:
            raise ValueError(f"ulysses_sequence_parallel_size={engine.layout.sp_size} needs use_remove_padding=True")
        engine.module, engine.optimizer = module, optimizer
        engine._adopt(remove_padding)
        return engine

    def _adopt(self, remove_padding: bool, offload_activations: bool = False) -> None:
        """Prepare passes over ``self.module``."""
        takes_media = uses_media(getattr(self.base_model, "config", None))
        if takes_media:
            install_vision(self.base_model)
        options = ForwardOptions(
            remove_padding=remove_padding,
            is_value_model=self.is_value_model,
            lead=self.lead,
            takes_media=takes_media,
            fused_head=has_fused_head(self.base_model) and not self.is_value_model,
            entropy_chunk_size=2048 if self.engine_config.entropy_from_logits_with_chunking else None,
            offload_activations=offload_activations,
        )
        self.forward = Forward(self.module, self.layout, options)
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        size = sum(p.numel() * p.element_size() for p in self.module.parameters())
        self._accumulates_whole = size <= ACCUMULATION_BUDGET_BYTES

    @property
    def _has_adapters(self) -> bool:
        return hasattr(self.module, "peft_config")

    # ---- modes

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Hold parameters, gradients and optimizer state on the device, dropout on."""
        self._load(optimizer=True)
        self.module.train()
        try:
            yield
        finally:
            self.optimizer_zero_grad()
            self.module.eval()
            self._reshard()
            self._offload()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Hold parameters on the device, dropout off."""
        self._load(optimizer=False)
        self.module.eval()
        try:
            yield
        finally:
            self._reshard()
            self._offload()

    def _reshard(self) -> None:
        """Free gathered weights: the outermost ones stay after a forward without a backward, and would be saved as
        they are, or outlive a loaded checkpoint.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _load(self, optimizer: bool) -> None:
        if self.engine_config.offload_policy:
            return
        device = str(self.layout.device)
        self.to(
            device, model=self.engine_config.param_offload, optimizer=optimizer and self.engine_config.optimizer_offload
        )

    def _offload(self) -> None:
        if self.engine_config.offload_policy:
            return
        self.to("cpu", model=self.engine_config.param_offload, optimizer=self.engine_config.optimizer_offload)

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to ``device``."""
        if model:
            self.module.to(device)
        if optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, device)
        if (model or optimizer) and device == "cpu" and self.layout.device.type != "cpu":
            get_torch_device().empty_cache()

    # ---- forward and backward

    def forward_backward_batch(
        self, data: "DataProto", loss_fn: LossFn, forward_only: bool = False
    ) -> dict[str, float]:
        """Accumulate the gradient of a mini-batch without a step, or only its metrics.

        The gradient is that of the loss over the global mini-batch, whatever the cut and the layout.
        """
        check_rows(data, self.lead)
        micro_batches = cut(data, self.layout.sp_size)
        units, rounds = agree(response_mask_of(data), len(micro_batches), self.layout.shares)
        metrics = MetricSums()
        with torch.set_grad_enabled(not forward_only), sequence_parallel(self.layout):
            for at in range(rounds):
                self._synchronize_gradients(at == rounds - 1)
                self._round(micro_batches[at] if at < len(micro_batches) else None, units, loss_fn, metrics, data, at)
        return metrics.reduce(units, self.layout.shares)

    def _round(
        self,
        micro_batch: MicroBatch | None,
        units: dict[str, float],
        loss_fn: LossFn,
        metrics: MetricSums,
        data: "DataProto",
        at: int,
    ) -> None:
        """Run one micro-batch; without one, take part in the collectives of the others."""
        if micro_batch is None:
            loss = self.forward.idle(data.meta_info)
        else:
            rows = micro_batch.rows.to(str(self.layout.device))
            output = self.forward(rows)
            terms, values = loss_fn(output, rows)
            metrics.add(values)
            parts = [term.total.float() / units[term.unit] for term in terms]
            loss = torch.stack(parts).sum() * self.layout.world_size  # FSDP averages over all ranks
        if at == 0 and data.meta_info.get("fault_point"):
            fault_point(data.meta_info["fault_point"], rank=self.layout.rank, step=data.meta_info.get("global_steps"))
        if torch.is_grad_enabled():
            loss.backward()

    def _synchronize_gradients(self, last: bool) -> None:
        """Reduce gradients and free gathered weights only after the last micro-batch, where memory allows."""
        if isinstance(self.module, FSDPModule) and torch.is_grad_enabled() and self._accumulates_whole:
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)

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

    def infer_batch(self, data: "DataProto") -> ModelOutput:
        """Run the model without gradient; outputs are (B, R) on the CPU, in the order of the rows."""
        check_rows(data, self.lead)
        micro_batches = cut(data, self.layout.sp_size)
        rounds = agree(None, len(micro_batches), self.layout.shares)[1]
        parts: list[tuple[list[int], ModelOutput]] = []
        with torch.no_grad(), sequence_parallel(self.layout):
            for at in range(rounds):
                if at < len(micro_batches):
                    output = self.forward(micro_batches[at].rows)
                    parts.append((micro_batches[at].index, {name: value.cpu() for name, value in output.items()}))
                else:
                    self.forward.idle(data.meta_info)
        order = torch.tensor([i for index, _ in parts for i in index]).argsort()
        return {name: torch.cat([output[name] for _, output in parts])[order] for name in parts[0][1]}

    # ---- optimizer

    def optimizer_zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def optimizer_step(self) -> float:
        """Clip and apply the gradient; returns its norm. A step with a non-finite norm is skipped."""
        if self.optimizer is None or self.optimizer_config is None:
            raise RuntimeError("this engine was built to infer: it has no optimizer (fsdp_config.forward_only)")
        gradients = local_gradients(self._parameters)
        norm = gradient_norm(gradients, self.layout.shard_group, self.layout.device)
        if not math.isfinite(norm):
            self.skipped_steps += 1
            logger.warning("the gradient norm is not finite: optimizer step skipped, %d so far", self.skipped_steps)
        else:
            scale_to_norm(gradients, norm, self.optimizer_config.clip_grad)
            self.optimizer.step()
            self._version += 1
        self.optimizer_zero_grad()
        return norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the learning rate that the last optimizer step used."""
        if self.lr_scheduler is None:
            raise RuntimeError("this engine was built to infer: it has no schedule (fsdp_config.forward_only)")
        used = float(self.lr_scheduler.get_last_lr()[0])
        self.lr_scheduler.step()
        return used

    # ---- weights

    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) of the sharded module."""
        return self.module.named_parameters()

    @property
    def weights_version(self) -> int:
        """Count the changes of the weights: optimizer steps and loaded checkpoints."""
        return self._version

    def named_weights(
        self, adapter_only: bool = False, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) in a fixed order, one tensor alive at a time.

        Collective: every rank drains it. Adapters are merged into the weights that they adapt, unless
        ``adapter_only`` asks for them alone. ``before`` is told the bytes of each tensor before it is gathered.
        """
        if adapter_only:
            yield from adapters.adapter_weights(self.module)
            return
        stream = adapters.merged_weights(self.module, before) if self._has_adapters else self._plain_weights(before)
        yield from checkpoint_names(self.base_model, stream)

    def _plain_weights(self, before: Callable[[int], None] | None) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.module.named_parameters():
            if before is not None:
                before(parameter.numel() * parameter.element_size())
            yield name, full_tensor(parameter)

    @property
    def base_model(self) -> Any:
        """The transformers model, under its adapters where it has some."""
        return self.module.get_base_model() if self._has_adapters else self.module  # type: ignore[operator]

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model without its adapters; the reference policy under LoRA."""
        if not self._has_adapters:
            return super().disable_adapter()
        context: AbstractContextManager[None] = self.module.disable_adapter()  # type: ignore[operator]
        return context

    def set_reference(self, engine: "BaseEngine | None") -> None:
        """Compare with another engine, or with this one without its adapters, where ``calculate_full_kl`` asks."""
        if engine is None:
            if not self._has_adapters:
                self.disable_adapter()  # says what is missing
            self.forward.reference = Reference(self.forward, self.disable_adapter)
            return
        if not isinstance(engine, FSDPEngine) or engine.layout.sp_size != self.layout.sp_size:
            raise ValueError("the reference must be an FSDP engine with the sequence parallelism of the policy")
        self.forward.reference = Reference(engine.forward)

    # ---- checkpoints

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint; collective."""
        self._load(optimizer=True)
        self.checkpoint_manager.save_checkpoint(
            local_path=local_path,
            hdfs_path=hdfs_path,
            global_step=global_step,
            max_ckpt_to_keep=max_ckpt_to_keep,
            named_weights=self.named_weights(),
            shared_folders={adapters.ADAPTER_FOLDER: partial(adapters.save_adapter, self.module)}
            if self._has_adapters
            else {},
        )
        self._offload()

    def keep_latest_checkpoints(self, local_path: str, max_ckpt_to_keep: int | None) -> None:
        """Remove the oldest complete checkpoints, so that so many are left with the one at ``local_path``."""
        self.checkpoint_manager.keep_latest(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore this rank's part of a checkpoint; collective."""
        self._load(optimizer=True)
        self.checkpoint_manager.load_checkpoint(
            local_path=local_path, hdfs_path=hdfs_path, del_local_after_load=del_local_after_load
        )
        self._version += 1
        self._offload()

    @property
    def checkpoint_manager(self) -> Any:
        """Writes and reads what ``checkpoint_config`` names."""
        if not hasattr(self, "_checkpoint_manager"):
            from verl.utils.checkpoint.fsdp_checkpoint_manager import FSDPCheckpointManager

            config = self.model_config
            processing_class = config.get_processor() if hasattr(config, "get_processor") else None
            self._checkpoint_manager = FSDPCheckpointManager(
                model=self.module,
                optimizer=self.optimizer,
                lr_scheduler=self.lr_scheduler,
                processing_class=processing_class,
                checkpoint_config=self.checkpoint_config,
                source_dtype=getattr(config.hf_config, "dtype", None),
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
        return self.layout.sp_rank == 0


@EngineRegistry.register("language_model", ["fsdp", "fsdp2"], ["cuda", "npu", "cpu"])
class FSDPEngineWithLMHead(FSDPEngine):
    """A policy: log-probabilities, and entropies where asked for."""


@EngineRegistry.register("value_model", ["fsdp", "fsdp2"], ["cuda", "npu", "cpu"])
class FSDPEngineWithValueHead(FSDPEngine):
    """A critic: one value at the position that predicts each token."""

    is_value_model = True


@EngineRegistry.register("reward_model", ["fsdp", "fsdp2"], ["cuda", "npu", "cpu"])
class FSDPEngineWithScoreHead(FSDPEngineWithValueHead):
    """A reward model: one value at each token itself, by a head that the checkpoint holds."""

    lead = 0
    makes_head = False
