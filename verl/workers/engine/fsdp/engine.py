"""The FSDP training engine: one implementation for both strategies, one process or many, and every device."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.optim.lr_scheduler import LambdaLR

from verl.base_config import ConfigError, Violation
from verl.errors import WrongInput
from verl.models.transformers.attention import VARLEN_ATTENTION
from verl.models.transformers.balancing import balancing_of
from verl.models.transformers.dense_common import has_fused_head
from verl.models.transformers.own_loss import loss_problems
from verl.models.transformers.packing import packing_problem
from verl.models.transformers.prefix_sharing import sharing_problems
from verl.models.transformers.remote import adapt, has_remote_code
from verl.models.transformers.rope import (
    SHARED_ROPE,
    RowRope,
    foreign_rope,
    has_length_rope,
    install_row_rope,
    install_row_temperature,
)
from verl.models.transformers.token_inputs import TokenInputs
from verl.models.transformers.vision import install_vision, is_vision_config, uses_media
from verl.utils.checkpoint.fsdp_checkpoint_manager import PREFIXED_KEY, FSDPCheckpointManager
from verl.utils.checkpoint.optimizer_settings import Settings
from verl.utils.device import current_device, get_torch_device
from verl.utils.fsdp_utils import gradient_norm, local_gradients, move_optimizer_state
from verl.utils.import_utils import is_own
from verl.utils.numerics.lr_schedules import num_warmup_steps, schedule_factor
from verl.utils.numerics.seeding import compute_deterministically
from verl.workers.config.engine import DEVICES, STRATEGIES
from verl.workers.engine.background_load import wait_for_weights, when_filled
from verl.workers.engine.base import AgreeOnDtypes, BaseEngine, OutputFn, Part
from verl.workers.engine.fsdp import adapters
from verl.workers.engine.fsdp.build import (
    ModelBuilder,
    checkpoint_names,
    keep_attention_whole,
    only_moves_values,
    precision_policy,
    use_packed_attention,
)
from verl.workers.engine.fsdp.compute_copies import WHOLE_MODEL_BYTES, ComputeCopies
from verl.workers.engine.fsdp.forward import Forward, Reference, sequence_parallel
from verl.workers.engine.fsdp.layout import check_layout, is_sharded, make_layout
from verl.workers.engine.fsdp.remote_code import check_remote_code
from verl.workers.engine.fsdp.residence import move_tensors, resident_tensors
from verl.workers.engine.passes import MicroBatch, PassSpec, Segment
from verl.workers.engine.registry import EngineRegistry

if TYPE_CHECKING:
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig


class FSDPEngine(BaseEngine):
    """A transformers model with AdamW, sharded by ``fully_shard`` when there is more than one rank."""

    config_key = "fsdp_config"
    engine_config: "FSDPEngineConfig"
    optimizer_config: "FSDPOptimizerConfig | None"
    module: nn.Module
    optimizer: torch.optim.Optimizer | None = None
    lr_scheduler: LambdaLR | None = None
    schedule: Settings | None = None
    prefixed = False

    # ---- start

    def initialize(self) -> None:
        """Build the model, optimizer and schedule, and load the pretrained weights."""
        config = self.engine_config
        if config.full_determinism:
            compute_deterministically()
        must_wrap = config.offload_policy or precision_policy(config, current_device()) is not None
        self.layout = make_layout(config, must_wrap)
        builder = ModelBuilder(
            self.model_config, config, self.layout, self.is_value_model, self.makes_head, self.freeze_vision_tower
        )
        self.module = builder.build()
        if not is_own(type(self)):  # an engine of the user, which may read the weights
            wait_for_weights()
        self.layout = builder.layout
        self.adapter_sizes = builder.adapter_sizes
        self.prefixed = builder.prefixed
        self._adopt_own()
        if self.optimizer_config is not None:
            self.optimizer = build_optimizer(self._parameters, self.optimizer_config)
            self.lr_scheduler = build_scheduler(self.optimizer, self.optimizer_config)
            self.schedule = schedule_settings(self.optimizer_config)
        self.module.eval()
        when_filled(self._offload)
        self._check_remote_code()

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
        """Return an engine around a transformers model and an optimizer that the caller has built.

        With several ranks, ``fully_shard`` has sharded the model. The engine trains, infers and yields weights; the
        caller owns offload, schedule and checkpoints.

        Raises: ValueError when the ranks do not share the module as ``fsdp_config`` says, or the module cannot take
        packed sequences.
        """
        settings = dataclasses.replace(engine_config, param_offload=False, optimizer_offload=False)
        engine = cls(None, settings, None if optimizer is None else optimizer_config)
        engine.layout = make_layout(settings, must_wrap=isinstance(module, FSDPModule))
        check_layout(module, engine.layout)
        if remove_padding:
            use_packed_attention(module)
        elif engine.layout.sp_size > 1:
            raise WrongInput(f"ulysses_sequence_parallel_size={engine.layout.sp_size} needs use_remove_padding=True")
        else:
            keep_attention_whole(module, engine.layout.device)
        engine.module = module
        engine.optimizer = optimizer
        engine._adopt(remove_padding)
        engine._check_remote_code()
        return engine

    def _check_remote_code(self) -> None:
        if not has_remote_code(self.base_model):
            return
        wait_for_weights()
        output = "values" if self.is_value_model else "log_probs"
        with self.eval_mode():
            check_remote_code(
                self.base_model,
                lambda batch: self.infer_batch(batch)[output],
                self.forward.remove_padding,
                self.layout.sp_size,
            )

    def _adopt_own(self) -> None:
        """Prepare forward passes with the options of the model's configuration."""
        self._adopt(
            self.model_config.use_remove_padding,
            self.model_config.enable_activation_offload,
            self.model_config.use_prefix_sharing,
        )

    def _adopt(self, remove_padding: bool, offload_activations: bool = False, shares_prefixes: bool = False) -> None:
        """Prepare passes over ``self.module``; padded rows share nothing.

        Raises: ConfigError for a model whose rows cannot be packed or share tokens.
        """
        config = getattr(self.base_model, "config", None)
        takes_media = uses_media(config)
        shares_prefixes = shares_prefixes and remove_padding
        self.shares_prefixes = shares_prefixes
        rope = self._row_rope()
        install_row_temperature(self.base_model)
        self._check_rows(remove_padding, rope)
        self._check_loss()
        asks_for_rows = None
        if config is not None and not has_remote_code(self.base_model):
            text = config.get_text_config()
            if text._attn_implementation == VARLEN_ATTENTION:
                asks_for_rows = f"model_type={text.model_type!r}"
        if has_remote_code(self.base_model):
            adapt(self.base_model, remove_padding)
        elif takes_media:
            install_vision(self.base_model)
        reads_types = config is not None and is_vision_config(config) and not takes_media
        token_inputs = None
        if reads_types and not has_remote_code(self.base_model):
            token_inputs = TokenInputs.of(self.base_model)
        balancing = None if config is None or self.is_value_model else balancing_of(self.base_model)
        self.aux_loss_coef = 0.0 if balancing is None else balancing.coefficient
        self.shares = self.layout.shares
        self.forward = Forward(
            self.module,
            self.layout,
            remove_padding=remove_padding,
            is_value_model=self.is_value_model,
            lead=self.lead,
            takes_media=takes_media,
            fused_head=has_fused_head(self.base_model) and not self.is_value_model,
            entropy_chunk_size=_chunk_size(self.engine_config),
            offload_activations=offload_activations,
            shares_prefixes=shares_prefixes,
            asks_for_rows=asks_for_rows,
            token_inputs=token_inputs,
            balancing=balancing,
            rope=rope,
        )
        self._parameters = [p for p in self.module.parameters() if p.requires_grad]
        size = sum(p.numel() * p.element_size() for p in self.module.parameters())
        self._accumulates_whole = size <= WHOLE_MODEL_BYTES

    def _check_loss(self) -> None:
        """Raise ConfigError for a policy whose own loss has a term that this engine does not compute."""
        if self.is_value_model or self.optimizer_config is None or not hasattr(self.base_model, "config"):
            return
        problems = loss_problems(self.base_model.config.to_dict(), self.engine_config.strategy)
        found = [Violation(f"model.override_config.{name}", value, fault) for name, value, fault in problems]
        if found:
            raise ConfigError(found)

    def _row_rope(self) -> RowRope | None:
        """Let RoPE choose its frequencies row by row, or by ``rope_length``.

        Raises: ConfigError for RoPE code that is not transformers' own, whose choice verl cannot control.
        """
        config = getattr(self.base_model, "config", None)
        if config is None or not has_length_rope(config):
            return None
        rope = install_row_rope(self.base_model, self.rope_length)
        if rope is None:
            raise ConfigError([Violation("model.path", config.name_or_path, foreign_rope(config))])
        return rope

    def _check_rows(self, remove_padding: bool, rope: RowRope | None) -> None:
        """Raise ConfigError for a model whose rows cannot be packed, or cannot share tokens."""
        if not remove_padding or not hasattr(self.base_model, "config"):
            return
        config = self.base_model.config
        fields = config.to_dict()
        if problem := packing_problem(fields):
            raise ConfigError([Violation("model.use_remove_padding", True, problem)])
        if not self.shares_prefixes:
            return
        problems = list(sharing_problems(fields, trains=self.optimizer_config is not None))
        if rope is not None and rope.length is None:
            problems.append(SHARED_ROPE)
        attention = config.get_text_config()._attn_implementation
        if attention != VARLEN_ATTENTION:
            problems.append(f"needs {VARLEN_ATTENTION}: leave attn_implementation={attention} out of override_config")
        if problems:
            raise ConfigError([Violation("model.use_prefix_sharing", True, problem) for problem in problems])

    # ---- modes

    @contextmanager
    def _on_device(self, *parts: Part) -> Iterator[None]:
        config = self.engine_config
        if not config.offload_policy:
            model = config.param_offload and "model" in parts
            self.to(str(self.layout.device), model=model, optimizer=config.optimizer_offload and "optimizer" in parts)
        try:
            yield
        finally:
            self._offload()

    def _offload(self) -> None:
        config = self.engine_config
        if not config.offload_policy:
            self.to("cpu", model=config.param_offload, optimizer=config.optimizer_offload)

    def _set_training(self, mode: bool) -> None:
        self.module.train(mode)

    def _free_gathered_weights(self) -> None:
        """Reshard every unit.

        FSDP keeps the root's weights gathered after a forward without a backward. A checkpoint would then save the
        gathered weights instead of the shards, and loading a checkpoint would not replace them.
        """
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to ``device``."""
        if model:
            self.module.to(device)
        if optimizer and self.optimizer is not None:
            move_optimizer_state(self.optimizer, device)
        if (model or optimizer) and device == "cpu" and self.layout.device.type != "cpu":
            get_torch_device().empty_cache()

    # ---- forward and backward

    def _run_micro_batches(
        self, micro_batches: list[MicroBatch], rounds: int, use: OutputFn, spec: PassSpec, forward_only: bool
    ) -> None:
        trains = not forward_only
        with torch.set_grad_enabled(trains), sequence_parallel(self.layout), self._computing(trains):
            for at in range(rounds):
                self._synchronize_gradients(at == rounds - 1)
                if at < len(micro_batches):
                    micro_batch = micro_batches[at].to(self.layout.device)
                    # FSDP averages gradients over all ranks, but the shares of the ranks must add up.
                    loss = use(self.forward(micro_batch.rows, spec), micro_batch) * self.layout.world_size
                else:
                    # A forward and a backward gather weights and reduce gradients with all ranks. A rank without rows
                    # takes part by a loss of zero; if it stayed out, the others would wait for it.
                    loss = self.forward.idle(spec)
                if at == 0 and spec.after_first_forward is not None:
                    spec.after_first_forward()
                if trains:
                    torch.autograd.backward(loss)

    def _computing(self, trains: bool) -> AbstractContextManager[None]:
        """Return a context in which the module computes in the configured dtype, if FSDP does not cast to it."""
        copies = ComputeCopies.of(self.module)
        return nullcontext() if copies is None else copies.in_place(trains)

    def take_segments(self) -> list[Segment]:
        """Return and forget the segments of passes with shared prefixes; see ``BaseEngine``."""
        segments = self.forward.segments
        self.forward.segments = []
        return segments

    def take_images(self) -> list[int]:
        """Return and forget the patches of each image that the vision tower has computed; see ``BaseEngine``."""
        images = list(self.forward.images.elements())
        self.forward.images.clear()
        return images

    def _synchronize_gradients(self, last: bool) -> None:
        """Reduce gradients and free gathered weights only after the last micro-batch, if memory allows.

        Reducing after every micro-batch would send the whole gradient each time. Accumulating first sends it once, and
        costs a whole gradient and the whole weights per rank between micro-batches (``WHOLE_MODEL_BYTES``).
        """
        if isinstance(self.module, FSDPModule) and torch.is_grad_enabled() and self._accumulates_whole:
            # The gradients of earlier micro-batches stay whole on this rank, and the last backward reduces their sum.
            self.module.set_requires_gradient_sync(last)
            self.module.set_reshard_after_backward(last)

    # ---- optimizer

    def optimizer_zero_grad(self) -> None:
        """Drop the accumulated gradient."""
        for parameter in self._parameters:
            parameter.grad = None

    def _reduce_gradients(self) -> tuple[list[Tensor], float]:
        # FSDP has reduced the gradients over all ranks, replicas included, so the norm adds squares over shards only.
        gradients = local_gradients(self._parameters)
        return gradients, gradient_norm(gradients, self.layout.shard_group, self.layout.device)

    def _apply_gradients(self) -> None:
        assert self.optimizer is not None
        self.optimizer.step()

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the learning rate that the last optimizer step used."""
        if self.lr_scheduler is None:
            raise self._no_schedule()
        used = float(self.lr_scheduler.get_last_lr()[0])
        self.lr_scheduler.step()
        return used

    @property
    def schedule_steps(self) -> int:
        """Number of steps that the learning-rate schedule has taken; checkpoints restore it."""
        return 0 if self.lr_scheduler is None else self.lr_scheduler.last_epoch

    def adopt(self, module: nn.Module, optimizer: Any, lr_scheduler: Any) -> None:
        """Replace model, optimizer and schedule by those that the user's code has built or changed."""
        if not hasattr(self, "layout"):  # not initialized: the model was built elsewhere
            self.layout = make_layout(self.engine_config, must_wrap=isinstance(module, FSDPModule))
        if module is not self.module:
            copies = None if self.module is None else ComputeCopies.of(self.module)
            # The layout was made for a model that one GPU holds whole; a sharded one needs process groups.
            if copies is not None and is_sharded(module):
                self.layout = make_layout(self.engine_config, must_wrap=True)
            elif copies is not None and ComputeCopies.of(module) is None:
                copies.serve_another(module)
            check_layout(module, self.layout)
            self.module = module
            self._adopt_own()
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self.optimizer = optimizer
        if lr_scheduler is not self.lr_scheduler:
            self.lr_scheduler = lr_scheduler
            self.schedule = None

    # ---- weights

    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) of the sharded module."""
        return self.module.named_parameters()

    def named_weights(
        self, adapter_only: bool = False, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) in a fixed order, one tensor alive at a time; see ``BaseEngine``."""
        if adapter_only:
            yield from adapters.adapter_weights(self.module)
            return
        yield from checkpoint_names(self.base_model, adapters.merged_weights(self.module, before))

    def sent_weights(
        self, agree: AgreeOnDtypes, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the weights in the dtypes of the receiver where those are smaller; see ``BaseEngine``."""
        model = self.base_model
        names = {}
        for name, parameter in self.module.named_parameters():
            if (plain := adapters.base_name(name)) is not None and only_moves_values(model):
                # A renaming that only moves values can be run on a tensor without memory, which gives the names under
                # which the receiver knows the parameter.
                like = torch.empty(parameter.shape, device="meta")
                names[name] = [each for each, _ in checkpoint_names(model, iter([(plain, like)]))]
        dtypes = dict(zip(names, agree(list(names.values())), strict=True))
        yield from checkpoint_names(model, adapters.merged_weights(self.module, before, dtypes))

    def resident_weights(self) -> dict[str, Tensor]:
        """Return the tensors in which this rank holds the whole model, by checkpoint name; see ``BaseEngine``."""
        return resident_tensors(self.module, self.base_model)

    def move_weights(self, places: Mapping[str, Tensor]) -> None:
        """Copy the weights to ``places``, where they live from then on; see ``BaseEngine``."""
        move_tensors(self.module, self.base_model, places)

    @property
    def base_model(self) -> Any:
        """The transformers model, without the wrapper of its adapters."""
        return self.module.get_base_model() if adapters.has_adapters(self.module) else self.module  # type: ignore[operator]

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model without its adapters; the reference policy under LoRA."""
        if not adapters.has_adapters(self.module):
            return super().disable_adapter()
        return self.module.disable_adapter()  # type: ignore[operator]

    def set_reference(self, engine: "BaseEngine | None") -> None:
        """Set the model that ``PassSpec.full_kl`` compares with; None is this engine without its adapters.

        Raises: RuntimeError without adapters, ValueError for an engine that packs sequences in another way.
        """
        if engine is None:
            if not adapters.has_adapters(self.module):
                self.disable_adapter()  # raises, and names the missing key
            self.forward.reference = Reference(self.forward, self.disable_adapter)
            return
        if not isinstance(engine, FSDPEngine) or engine.layout.sp_size != self.layout.sp_size:
            raise ValueError("the reference must be an FSDP engine with the sequence parallelism of the policy")
        if engine.shares_prefixes != self.shares_prefixes:
            raise ValueError(
                f"the reference has use_prefix_sharing={engine.shares_prefixes} and the policy "
                f"{self.shares_prefixes}: give both the same, because they compare token by token"
            )
        self.forward.reference = Reference(engine.forward)

    # ---- checkpoints

    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint; collective."""
        folders = (
            {adapters.ADAPTER_FOLDER: partial(adapters.save_adapter, self.module)}
            if adapters.has_adapters(self.module)
            else {}
        )
        with self._on_device("model", "optimizer"):
            self.checkpoint_manager.save_checkpoint(
                local_path, hdfs_path, global_step, max_ckpt_to_keep, self.named_weights(), folders
            )

    @cached_property
    def checkpoint_manager(self) -> FSDPCheckpointManager:
        """Write and read the parts that ``checkpoint_config`` names."""
        return FSDPCheckpointManager(
            model=self.module,
            optimizer=self.optimizer,
            lr_scheduler=self.lr_scheduler,
            processing_class=self.model_config.get_processor(),
            checkpoint_config=self.checkpoint_config,
            source_dtype=self.model_config.hf_config.dtype,
            source_folder=self.model_config.local_path,
            keeps_settings=self.keeps_settings,
            source_files=self.model_config.source_files(),
            schedule=self.schedule,
            more_layout_fields={PREFIXED_KEY: True} if self.prefixed else {},
        )

    # ---- layout

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are the ones collected."""
        return self.layout.sp_rank == 0


def build_optimizer(parameters: Sequence[Tensor], config: "FSDPOptimizerConfig") -> torch.optim.AdamW:
    """Return AdamW over the parameters that train.

    Raises: ValueError when there are none.
    """
    if not parameters:
        raise WrongInput("no parameter of the model trains: unfreeze some, or set fsdp_config.forward_only=True")
    return torch.optim.AdamW(
        parameters, lr=config.lr, betas=(config.betas[0], config.betas[1]), weight_decay=config.weight_decay, fused=True
    )


def schedule_settings(config: "FSDPOptimizerConfig") -> Settings:
    """Return the keys of ``optim`` that the schedule reads, with the number of steps of the warm-up.

    Raises: ValueError when the schedule needs a length that was not given.
    """
    total = config.total_training_steps if config.total_training_steps is not None else -1
    warmup = num_warmup_steps(config.lr_warmup_steps, config.lr_warmup_steps_ratio, total)
    settings: Settings = {"lr_scheduler_type": config.lr_scheduler_type, "lr_warmup_steps": warmup}
    if config.lr_scheduler_type == "constant":
        return settings
    if total <= 0:
        raise WrongInput(f"optim.lr_scheduler_type=cosine needs optim.total_training_steps > 0, got {total}")
    shape = {"min_lr_ratio": config.min_lr_ratio or 0.0, "num_cycles": config.num_cycles}
    return settings | {"total_training_steps": total} | shape


def _chunk_size(config: "FSDPEngineConfig") -> int | None:
    """Return the rows of logits that are computed at once; None: as many as suit the device."""
    return config.entropy_from_logits_chunk_size if config.entropy_from_logits_with_chunking else None


def build_scheduler(optimizer: torch.optim.Optimizer, config: "FSDPOptimizerConfig") -> LambdaLR:
    """Return the schedule.

    Raises: ValueError when the schedule needs a length that was not given.
    """
    return LambdaLR(optimizer, schedule_factor(schedule_settings(config)))


@EngineRegistry.register("language_model", STRATEGIES, DEVICES)
class FSDPEngineWithLMHead(FSDPEngine):
    """A policy: log-probabilities, and entropies on request."""


@EngineRegistry.register("value_model", STRATEGIES, DEVICES)
class FSDPEngineWithValueHead(FSDPEngine):
    """A critic: one value at the position that predicts each token."""

    is_value_model = True


@EngineRegistry.register("reward_model", STRATEGIES, DEVICES)
class FSDPEngineWithScoreHead(FSDPEngineWithValueHead):
    """A reward model: one value at each token itself, by a head that the checkpoint holds."""

    lead = 0
    makes_head = False
