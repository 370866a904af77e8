"""The Megatron-Core training engine, on CUDA with NCCL and on the CPU with gloo."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from verl.models.mcore.families import text_of
from verl.models.mcore.gpt.build import attach_fused_head, attach_picker
from verl.models.mcore.gpt.export import exported_weights
from verl.models.mcore.gpt.vision import takes_axes
from verl.utils.checkpoint.megatron_checkpoint_manager import MegatronCheckpointManager
from verl.utils.import_utils import is_own
from verl.utils.megatron.offload import Offload
from verl.utils.megatron.optimizer import (
    get_megatron_optimizer,
    get_megatron_optimizer_param_scheduler,
    init_megatron_optim_config,
)
from verl.utils.model import value_model_config
from verl.workers.engine.background_load import wait_for_weights, when_filled
from verl.workers.engine.base import AgreeOnDtypes, BaseEngine, OutputFn, Part, T
from verl.workers.engine.megatron.build import ModelBuilder, gather_weights, model_dtype, share_folder, wrap
from verl.workers.engine.megatron.forward import Forward, Round, check_positions
from verl.workers.engine.megatron.layout import make_layout
from verl.workers.engine.passes import MicroBatch, PassSpec, Segment
from verl.workers.engine.registry import EngineRegistry

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import ChainedOptimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from transformers import PretrainedConfig

    from verl.models.mcore.bridge import Bridge
    from verl.protocol import DataProto
    from verl.workers.config import McoreEngineConfig, McoreOptimizerConfig


class MegatronEngine(BaseEngine):
    """A ``GPTModel`` with AdamW, laid out over tensor, pipeline, context and data parallel ranks.

    Rows are always packed. Every rank of a pipeline returns the outputs and metrics of its last stage.
    """

    config_key = "megatron"
    engine_config: "McoreEngineConfig"
    optimizer_config: "McoreOptimizerConfig | None"
    models: list["GPTModel"]
    module: list[MegatronModule]  # the models, wrapped when they train
    optimizer: "ChainedOptimizer | None" = None
    lr_scheduler: "OptimizerParamScheduler | None" = None
    bridge: "Bridge | None" = None
    """The converter of weights for a model that the tables of verl.models.mcore lack."""
    _depth = 0
    _weights_are_shards = False

    # ---- start

    def initialize(self) -> None:
        """Build the model, optimizer and schedule, and load the pretrained weights."""
        config = self.engine_config
        self.layout = make_layout(config)
        if config.share_model_files and self.layout.world_size > 1:
            share_folder(self.model_config)
        builder = ModelBuilder(
            self.model_config,
            config,
            self.layout,
            self.is_value_model,
            self.makes_head,
            self.load_weight,
            self.freeze_vision_tower,
        )
        self.models = builder.build()
        self.bridge = builder.bridge
        loads_last = builder.reads_alone and not self._needs_weights
        if not loads_last:
            builder.load(self.models)
        self.module = list(self.models)
        if self.optimizer_config is None:
            for model in self.models:
                model.requires_grad_(False)
        else:
            self.module = wrap(self.models, config)
            dtype = model_dtype(config, self.layout.device)
            settings = init_megatron_optim_config(self.optimizer_config, dtype, config.use_distributed_optimizer)
            self.optimizer = get_megatron_optimizer(self.module, settings)
            self.lr_scheduler = get_megatron_optimizer_param_scheduler(self.optimizer, self.optimizer_config)
        if loads_last:
            builder.load(self.models, at_once=False)
            if self.optimizer is not None:  # the optimizer may hold copies in fp32
                when_filled(self.optimizer.reload_model_params)
        if not is_own(type(self)):  # an engine of the user, which may read the weights
            wait_for_weights()
        self._adopt(self.model_config.hf_config, builder.fuses_head, self.model_config.use_prefix_sharing)
        self._unload()

    @property
    def _needs_weights(self) -> bool:
        """Whether the weights must be loaded before the optimizer is built.

        That is so if the weights are offloaded next, so that a rollout engine finds the memory free, or if an option
        copies the weights in a way that ``reload_model_params`` does not repeat.
        """
        config = self.engine_config
        optimizer = self.optimizer_config
        options = optimizer is not None and (optimizer.override_optimizer_config or config.override_ddp_config)
        is_quantized = any(key.startswith(("fp8", "fp4")) for key in config.override_transformer_config)
        return config.param_offload or config.optimizer_offload or is_quantized or bool(options)

    @classmethod
    def from_modules(
        cls,
        modules: Sequence[MegatronModule],
        optimizer: "ChainedOptimizer | None",
        hf_config: "PretrainedConfig",
        engine_config: "McoreEngineConfig",
        optimizer_config: "McoreOptimizerConfig | None" = None,
        fuses_head: bool = False,
    ) -> Self:
        """Return an engine around the chunks of this rank, each a ``GPTModel`` or one in ``DistributedDataParallel``.

        Without ``optimizer`` it only infers; ``fuses_head`` lets a policy score tokens without making logits. The
        layout is that of the process, and ``engine_config`` has to name the same sizes.

        Raises: ValueError when the chunks train and are not wrapped, or the process has another layout.
        """
        engine = cls(None, engine_config, None if optimizer is None else optimizer_config)
        engine.layout = make_layout(engine_config)
        wrapped = [isinstance(each, DistributedDataParallel) for each in modules]
        if optimizer is not None and not all(wrapped):
            raise ValueError(
                "an optimizer needs modules in Megatron-Core's DistributedDataParallel, which accumulates gradients"
            )
        engine.models = [each.module if outer else each for each, outer in zip(modules, wrapped, strict=True)]
        engine.module = list(modules)
        engine.optimizer = optimizer
        for model in engine.models:
            attach_picker(model, engine.layout.tp_group)
            if fuses_head:
                attach_fused_head(model, text_of(hf_config).vocab_size, engine.layout.tp_group)
        engine._adopt(hf_config, fuses_head)
        return engine

    def _adopt(self, hf_config: "PretrainedConfig", fuses_head: bool, shares_prefixes: bool = False) -> None:
        """Prepare passes over the chunks."""
        self.shares = self.layout.shares
        self.hf_config = hf_config
        self.shares_prefixes = shares_prefixes
        self.forward = Forward(
            self.layout,
            self.is_value_model,
            text_of(hf_config).vocab_size,
            self.models[0].config.sequence_parallel,
            self.lead,
            fuses_head,
            takes_axes(self.models[0]),
            shares_prefixes,
        )
        self.offload = Offload(self.module, self.optimizer, self.layout.device)
        self._set_training(False)

    # ---- modes

    def _set_training(self, mode: bool) -> None:
        for module in self.module:
            module.train(mode)

    @contextmanager
    def _on_device(self, *parts: Part) -> Iterator[None]:
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
        """Move parts to the host (``cpu``), or back (``device``, or the name of the device).

        On a CPU worker ``cpu`` offloads, too. A mode brings back what it needs.

        Raises: ValueError for another device.
        """
        kind = "device" if device == "device" else torch.device(device).type
        if kind not in ("device", "cpu", self.layout.device.type):
            raise ValueError(f"the Megatron engine cannot move to {device!r}: write cpu or {self.layout.device.type}")
        move = self.offload.unload if kind == "cpu" else self.offload.load
        for part, wanted in (("model", model), ("grad", grad), ("optimizer", optimizer)):
            if wanted:
                move(part)

    # ---- forward and backward

    def _split(self, data: "DataProto", spec: PassSpec) -> list[MicroBatch]:
        micro_batches = super()._split(data, spec)
        if not self.forward.takes_axes:
            check_positions(data)
        return micro_batches

    def _run_micro_batches(
        self, micro_batches: list[MicroBatch], rounds: int, use: OutputFn, spec: PassSpec, forward_only: bool
    ) -> None:
        """Drive Megatron-Core's pipeline schedule.

        All stages must run the same number of micro-batches, since each waits for the activations of its neighbours.
        A rank with fewer runs empty ones. The interleaved schedule of virtual stages also needs a multiple of the
        pipeline size: it works through the chunks in groups of that many micro-batches.
        """
        needed: tuple[Part, ...] = ("model",) if forward_only else ("model", "grad")
        if away := [part for part in needed if self.offload.is_away(part)]:
            raise RuntimeError(f"the engine's {' and '.join(away)} is offloaded: enter train_mode or eval_mode first")
        if self.layout.virtual_stages > 1:
            # The rounds that this adds are empty on all ranks, and their loss is zero.
            rounds = -(-rounds // self.layout.pp_size) * self.layout.pp_size

        def batches(chunk: int = 0) -> Iterator[Round]:
            for at in range(rounds):
                micro_batch = micro_batches[at] if at < len(micro_batches) else None
                # Each virtual chunk reads all micro-batches again; segments and images count at the first only.
                yield self.forward.prepare(at, micro_batch, counts=chunk == 0)

        def finish(found: Tensor, round_: Round) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            """Return the scalar to differentiate, and a token count and metrics that nothing reads."""
            if round_.micro_batch is None:
                # Zero, but still a function of the output: the backward pass of an empty round must reach the stage
                # before.
                result = found.sum() * 0.0
            else:
                result = use(self.forward.outputs(found, round_, spec), round_.micro_batch)
            return result, torch.zeros((), dtype=torch.int, device=self.layout.device), {}

        def step(
            iterator: Iterator[Round], model: MegatronModule
        ) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]]:
            round_ = next(iterator)
            # With gradient buffers Megatron-Core hands over the wrapper of a chunk.
            chunk = model if model in self.models else model.module
            output = self.forward.run(model, chunk, round_, spec)
            if round_.at == 0 and spec.after_first_forward is not None:
                spec.after_first_forward()
            return output, partial(finish, round_=round_)

        chunks = len(self.module)
        with torch.set_grad_enabled(not forward_only):
            get_forward_backward_func()(
                forward_step_func=step,
                data_iterator=[batches(chunk) for chunk in range(chunks)] if chunks > 1 else batches(),
                model=self.module,
                num_microbatches=rounds,
                seq_length=1,  # lengths vary: the stages tell each other
                micro_batch_size=1,
                forward_only=forward_only,
            )

    def take_segments(self) -> list[Segment]:
        """Return and forget the segments of passes with shared prefixes; see ``BaseEngine``."""
        segments = list(self.forward.segments)
        self.forward.segments.clear()
        return segments

    def take_images(self) -> list[int]:
        """Return and forget the patches of each image that the vision tower has computed; see ``BaseEngine``."""
        images = list(self.forward.images.elements())
        self.forward.images.clear()
        return images

    def _from_output_ranks(self, make: Callable[[], T]) -> T:
        """Return the result of this pipeline's last stage on all of its ranks; collective."""
        if self.layout.pp_size == 1:
            return make()
        group = self.layout.pp_group
        box: list[T | None] = [make() if self.layout.pp_rank == self.layout.pp_size - 1 else None]
        dist.broadcast_object_list(box, src=dist.get_global_rank(group, group.size() - 1), group=group)
        received = box[0]
        assert received is not None
        return received

    # ---- optimizer

    def optimizer_zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        if self.optimizer is None or self.offload.is_away("grad"):
            return
        for module in self.module:
            module.zero_grad_buffer()
        self.optimizer.zero_grad()

    def _reduce_gradients(self) -> tuple[list[Tensor], float]:
        """Return the gradients of the main parameters, which ``step_with_ready_grads`` applies.

        ``optimizer.step`` would clip in Megatron-Core's own way and skip non-finite steps without counting them.
        Here the norm is read between preparation and step, so that both engines clip alike.
        """
        assert self.optimizer is not None
        # Copies the gradients to the main parameters; the schedule has reduced them over the ranks.
        self.optimizer.prepare_grads()
        norm = float(self.optimizer.get_grad_norm())
        parameters = [p for each in self.optimizer.chained_optimizers for p in each.get_parameters()]
        gradients = [_grad_of(parameter) for parameter in parameters]
        return [gradient for gradient in gradients if gradient is not None], norm

    def _apply_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step_with_ready_grads()
        # Each rank has updated the shard of its distributed optimizer; see ``_finish_updates``.
        self._weights_are_shards = True

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the learning rate that the last optimizer step used."""
        if self.lr_scheduler is None:
            raise self._no_schedule()
        used = float(self.lr_scheduler.get_lr({}))
        self.lr_scheduler.step(1)
        return used

    @property
    def schedule_steps(self) -> int:
        """Number of steps that the learning-rate schedule has taken; checkpoints restore it."""
        return 0 if self.lr_scheduler is None else int(self.lr_scheduler.num_steps)

    def adopt(self, module: Any, optimizer: Any, lr_scheduler: Any) -> None:
        """Replace optimizer and schedule by those that the user's code has built or changed.

        Raises: ValueError for another model: the optimizer and the exported weights belong to the chunks built here.
        """
        super().adopt(module, self.optimizer, self.lr_scheduler)
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler

    # ---- weights

    def _finish_updates(self) -> None:
        """Gather the weights after an optimizer step; collective.

        The distributed optimizer updates a shard of the weights on each rank. With ``overlap_param_gather`` the next
        forward pass gathers them, and until then the other shards are those of the step before. Exports and
        checkpoints must not read them so.
        """
        if self._weights_are_shards:
            with self._on_device("model"):
                gather_weights(self.module)
            self._weights_are_shards = False

    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) of this rank's part of the model, chunk by chunk."""
        for chunk, model in enumerate(self.models):
            for name, parameter in model.named_parameters():
                yield f"{chunk}.{name}", self.offload.value_of(parameter)

    def named_weights(
        self, adapter_only: bool = False, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) in a fixed order, one parameter's tensors alive at a time.

        See ``BaseEngine``. The names are those of Hugging Face: a fused parameter of Megatron-Core (query, key and
        value; gate and up) is gathered over its ranks and then cut into its parts.
        """
        if adapter_only:
            raise RuntimeError("the engine holds no adapter: model.lora_rank is 0")
        yield from self._weights(None, before)

    def sent_weights(
        self, agree: AgreeOnDtypes, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in the dtypes of the receiver where those are smaller; see ``BaseEngine``."""
        return self._weights(agree, before)

    def _weights(
        self, agree: AgreeOnDtypes | None, before: Callable[[int], None] | None
    ) -> Iterator[tuple[str, Tensor]]:
        self._finish_updates()
        if self.bridge is not None:
            yield from self._bridged_weights(self.bridge, before)
            return
        value_of = self.offload.value_of  # moves offloaded tensors to the device one at a time
        yield from exported_weights(self.models, self.hf_config, self.is_value_model, value_of, before, agree=agree)

    def _bridged_weights(self, bridge: "Bridge", before: Callable[[int], None] | None) -> Iterator[tuple[str, Tensor]]:
        with self._on_device("model"):
            for name, tensor in bridge.weights(self.models):
                if before is not None:
                    before(tensor.numel() * tensor.element_size())
                yield name, tensor

    # ---- checkpoints

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint; collective."""
        with self._on_device("model", "optimizer"):
            self._finish_updates()
            self.checkpoint_manager.save_checkpoint(
                local_path, hdfs_path, global_step, max_ckpt_to_keep, self.named_weights()
            )

    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Complete an asynchronous save; returns whether none is left. Collective."""
        # If no manager exists, nothing was saved. Creating one here would need the model's files.
        return "checkpoint_manager" not in vars(self) or self.checkpoint_manager.finish_checkpoint(wait)

    @cached_property
    def checkpoint_manager(self) -> MegatronCheckpointManager:
        """Write and read the parts that ``checkpoint_config`` names.

        Optimizer state goes into torch_dist files as parts of whole tensors, with the offset of each part. So another
        layout, whose distributed optimizer cuts the state at other places, can read it.
        """
        return MegatronCheckpointManager(
            model=self.models,
            hf_config=self._saved_config(),
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.model_config.get_processor(),
            checkpoint_config=self.checkpoint_config,
            source_dtype=self.hf_config.dtype,
            source_folder=self.model_config.local_path,
            keeps_settings=self.keeps_settings,
            source_files=self.model_config.source_files(),
        )

    def _saved_config(self) -> "PretrainedConfig":
        """Return the configuration that describes the saved model; transformers may have no class of a critic."""
        if self.is_value_model:
            with suppress(ValueError):
                return value_model_config(self.hf_config)
        return self.hf_config

    # ---- layout

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are the ones collected."""
        return self.layout.holds_outputs


def _grad_of(parameter: Tensor) -> Tensor | None:
    """Return the gradient that is applied: ``use_precision_aware_optimizer`` keeps it as ``decoupled_grad``."""
    decoupled: Tensor | None = getattr(parameter, "decoupled_grad", None)
    return parameter.grad if decoupled is None else decoupled


@EngineRegistry.register("language_model", "megatron", ["cuda", "cpu"])
class MegatronEngineWithLMHead(MegatronEngine):
    """A policy: log-probabilities, and entropies on request."""


@EngineRegistry.register("value_model", "megatron", ["cuda", "cpu"])
class MegatronEngineWithValueHead(MegatronEngine):
    """A critic: one value at the position that predicts each token."""

    is_value_model = True


@EngineRegistry.register("reward_model", "megatron", ["cuda", "cpu"])
class MegatronEngineWithScoreHead(MegatronEngineWithValueHead):
    """A reward model: one value at each token itself, by a head that the checkpoint holds."""

    lead = 0
    makes_head = False
