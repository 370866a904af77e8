"""The training engine: one interface for every backend and role, and code that backends share."""

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.algos.aggregate import Metric, Sum
from verl.errors import WrongInput
from verl.utils.flops_counter import AdapterSizes
from verl.utils.fsdp_utils import scale_to_norm
from verl.workers.engine import passes
from verl.workers.engine.passes import MicroBatch, PassSpec, Shares

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.utils.checkpoint.checkpoint_manager import BaseCheckpointManager
    from verl.workers.config import (
        CheckpointConfig,
        FSDPEngineConfig,
        HFModelConfig,
        McoreEngineConfig,
        OptimizerConfig,
    )

logger = logging.getLogger(__name__)

# ``log_probs`` (and ``entropy``, ``full_kl`` on request) or ``values``, each (b, R) and zero outside the response mask.
# A pass with a gradient may add ``AUX_LOSS``, which the engine takes out before a loss sees the output.
ModelOutput = dict[str, Tensor]

# Takes the output for a micro-batch and its rows; returns the terms of the loss and its metrics.
LossFn = Callable[[ModelOutput, "DataProto"], tuple[list[Sum], dict[str, Metric]]]

# Takes the output for a micro-batch and the micro-batch; returns the scalar to differentiate.
OutputFn = Callable[[ModelOutput, MicroBatch], Tensor]

# Takes, for each parameter, the checkpoint names of its tensors; returns the dtype in which the receivers of all ranks
# hold these tensors, or None if the dtypes differ or a receiver stores the tensor in another form. Collective.
AgreeOnDtypes = Callable[[Sequence[Sequence[str]]], Sequence[torch.dtype | None]]

Part = Literal["model", "grad", "optimizer"]
T = TypeVar("T")


class BaseEngine(ABC):
    """A model with its optimizer, laid out over the ranks of this process group.

    Batches are padded ``DataProto`` shards of this data-parallel rank: ``input_ids``, ``attention_mask`` (B, L),
    ``position_ids`` (B, L) or (B, C, L), ``responses`` (B, R) and, when part of the response does not count,
    ``response_mask`` (B, R). Rows may hold images and videos as ``multi_modal_inputs``, the outputs of the model's
    processor. Padding removal, micro-batching and parallelism stay inside. Each pass takes its options as a
    ``PassSpec``; without one they come from the batch's ``meta_info`` (``PassSpec.from_meta``).

    The public methods are templates. A backend builds the model, moves it, runs micro-batches, and reduces and
    applies gradients. An engine that uses the templates defines the hooks that raise ``NotImplementedError`` in this
    class. An engine that replaces the templates needs neither the hooks nor the arguments of this constructor.

    Args:
        freeze_vision_tower: keep the weights of the vision tower.
        load_weight: load the pretrained weights; Megatron-Core can draw them from a seed instead.
        rope_length: the length that selects RoPE frequencies (dynamic, longrope) for all rows; by default each row uses
            its own. Only FSDP supports such RoPE.

    Attributes:
        adapter_sizes: how large the adapters are, set by ``initialize`` when only adapters learn.
        is_value_model: the model returns values, not distributions over tokens.
        aux_loss_coef: weight of the balancing loss of the model's experts, as its configuration says; 0 without one.
        lead: a token is read this many positions before itself: 1 where it is predicted, 0 where it has been seen.
        step_hook: called instead of ``optimizer_step``, which it may call; returns the norm of the gradient.
        makes_head: draw a new value head if the checkpoint holds none.
        shares_prefixes: tokens with which several rows of a micro-batch begin are computed once.
        config_key: the configuration node of the backend, for messages.
        weights_version: how often the weights have changed, by optimizer steps and loaded checkpoints.
        shares: the ranks over which a mini-batch adds up, set by ``initialize``.
    """

    module: Any = None
    optimizer: Any = None
    lr_scheduler: Any = None
    step_hook: Callable[[], float | Tensor] | None = None
    adapter_sizes: AdapterSizes | None = None
    weights_version = 0
    skipped_steps = 0
    is_value_model = False
    aux_loss_coef = 0.0
    lead = 1
    makes_head = True
    shares_prefixes = False
    config_key: str
    engine_config: "FSDPEngineConfig | McoreEngineConfig"
    shares: Shares

    def __init__(
        self,
        model_config: "HFModelConfig | None" = None,
        engine_config: "FSDPEngineConfig | McoreEngineConfig | None" = None,
        optimizer_config: "OptimizerConfig | None" = None,
        checkpoint_config: "CheckpointConfig | None" = None,
        freeze_vision_tower: bool = False,
        load_weight: bool = True,
        rope_length: int | None = None,
    ) -> None:
        self.model_config = model_config
        if engine_config is not None:
            self.engine_config = engine_config
            self.optimizer_config = None if engine_config.forward_only else optimizer_config
        self.checkpoint_config = checkpoint_config
        self.freeze_vision_tower = freeze_vision_tower
        self.load_weight = load_weight
        self.rope_length = rope_length

    @property
    def model_config(self) -> "HFModelConfig":
        """The model node.

        Raises: RuntimeError for an engine around a module that the caller has built.
        """
        if self._model_config is None:
            raise RuntimeError(f"this {type(self).__name__} was given a built module: the caller owns its model files")
        return self._model_config

    @model_config.setter
    def model_config(self, model_config: "HFModelConfig | None") -> None:
        self._model_config = model_config

    @abstractmethod
    def initialize(self) -> None:
        """Build the model, optimizer and schedule, and load the pretrained weights."""

    # ---- modes

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Hold parameters, gradients and optimizer state on the device, dropout on."""
        with self._on_device("model", "grad", "optimizer"):
            self._set_training(True)
            try:
                yield
                # Skipped after an error: the call is collective, and other ranks might not make it.
                self._finish_updates()
            finally:
                self.optimizer_zero_grad()
                self._set_training(False)
                self._free_gathered_weights()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Hold parameters on the device, dropout off."""
        with self._on_device("model"):
            self._set_training(False)
            try:
                yield
            finally:
                self._free_gathered_weights()

    def _missing(self, hook: str) -> NotImplementedError:
        """Return the error for an engine that uses a template method of this class but lacks one of its hooks."""
        return NotImplementedError(f"{type(self).__name__} must define {hook}, which the templates of BaseEngine call")

    def _on_device(self, *parts: Part) -> AbstractContextManager[None]:
        """Hold parts of the state on the device; offloaded parts return to the host afterwards."""
        raise self._missing("_on_device")

    def _set_training(self, mode: bool) -> None:
        """Switch dropout on or off."""
        raise self._missing("_set_training")

    def _finish_updates(self) -> None:
        """Complete the work that an optimizer step left to the next forward pass; collective."""
        return

    def _free_gathered_weights(self) -> None:
        """Free the whole weights that a forward pass has gathered."""
        return

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to ``device``."""

    # ---- forward and backward

    def train_batch(self, data: "DataProto", loss_fn: LossFn, spec: PassSpec | None = None) -> dict[str, float]:
        """Take one optimizer step on a mini-batch.

        Returns: the metrics of ``loss_fn`` over the global mini-batch, equal on every rank, and ``grad_norm``; also
        ``skipped_steps``, the count so far, once a step had a non-finite norm.
        """
        self.optimizer_zero_grad()
        metrics = self.forward_backward_batch(data, loss_fn, spec=spec)
        # A hook of the user may call ``optimizer_step``, which counts, or step by itself, which must count too.
        version = self.weights_version
        metrics["grad_norm"] = float(self.optimizer_step() if self.step_hook is None else self.step_hook())
        if self.step_hook is not None and self.weights_version == version and math.isfinite(metrics["grad_norm"]):
            self.weights_version += 1  # a step of the user's own, which the rollout must learn of
        if self.skipped_steps:
            metrics["skipped_steps"] = float(self.skipped_steps)
        return metrics

    def forward_backward_batch(
        self, data: "DataProto", loss_fn: LossFn, forward_only: bool = False, spec: PassSpec | None = None
    ) -> dict[str, float]:
        """Accumulate the gradient of a mini-batch without a step, or only its metrics.

        The gradient is that of the loss over the global mini-batch, for every micro-batch size and layout: the ranks
        first agree on the counts (tokens, sequences) of the whole mini-batch, and each micro-batch divides its sums by
        those. In plain form: ``loss = sum over micro-batches and ranks of (term.total / count[term.unit])``.

        The balancing loss of experts is the exception: each micro-batch has its own, and their mean is added.
        """
        spec = spec or PassSpec.from_meta(data.meta_info)
        micro_batches = self._split(data, spec)
        units, rounds = passes.agree(data, len(micro_batches), self.shares)
        metrics = passes.MetricSums()

        def loss_of(output: ModelOutput, micro_batch: MicroBatch) -> Tensor:
            aux_loss = output.pop(passes.AUX_LOSS, None)
            terms, values = loss_fn(output, micro_batch.rows)
            metrics.add(values)
            if aux_loss is not None:
                metrics.add({passes.AUX_LOSS: Sum(aux_loss, "micro_batch")})
                terms = [*terms, Sum(self.aux_loss_coef * aux_loss, "micro_batch")]
            return torch.stack([term.total.float() / units[term.unit] for term in terms]).sum()

        self._run_micro_batches(micro_batches, rounds, loss_of, spec, forward_only)
        return self._from_output_ranks(lambda: metrics.reduce(units, self.shares))

    def infer_batch(self, data: "DataProto", spec: PassSpec | None = None) -> ModelOutput:
        """Run the model without gradient; outputs are (B, R) on the CPU, in the order of the rows."""
        spec = spec or PassSpec.from_meta(data.meta_info)
        micro_batches = self._split(data, spec)
        rounds = passes.agree(None, len(micro_batches), self.shares)[1]
        parts: list[ModelOutput] = []
        index: list[int] = []

        def keep(output: ModelOutput, micro_batch: MicroBatch) -> Tensor:
            parts.append({name: value.cpu() for name, value in output.items()})
            index.extend(micro_batch.index)
            return torch.zeros((), device=self.shares.device)

        def joined() -> ModelOutput:
            # Micro-batches of similar length take rows out of their order; ``index`` is where each came from.
            order = torch.tensor(index).argsort()
            return {name: torch.cat([part[name] for part in parts])[order] for name in parts[0]}

        self._run_micro_batches(micro_batches, rounds, keep, spec, forward_only=True)
        return self._from_output_ranks(joined)

    def _split(self, data: "DataProto", spec: PassSpec) -> list[MicroBatch]:
        """Check a batch and cut it into micro-batches."""
        passes.check_rows(data, self.lead)
        return passes.split_batch(data, spec, self.shares.copies, self.shares_prefixes)

    def _run_micro_batches(
        self, micro_batches: list[MicroBatch], rounds: int, use: OutputFn, spec: PassSpec, forward_only: bool
    ) -> None:
        """Run ``rounds`` forward (and backward) passes; ``use`` turns each output into the loss to differentiate.

        Ranks have different numbers of micro-batches, but passes are collective. A rank with fewer than ``rounds``
        runs empty passes for the rest.
        """
        raise self._missing("_run_micro_batches")

    def _from_output_ranks(self, make: Callable[[], T]) -> T:
        """Call ``make`` on the ranks that have outputs, and return its result on all ranks. Collective."""
        return make()

    def take_segments(self) -> list[passes.Segment]:
        """Return and forget the segments of passes with shared prefixes; empty without such passes."""
        return []

    def take_images(self) -> list[int] | None:
        """Return and reset the numbers of patches of the images that the vision tower computed; None if uncounted."""
        return None

    def set_reference(self, engine: "BaseEngine | None") -> None:
        """Set the model that ``PassSpec.full_kl`` compares with; None is this engine without its adapters."""
        raise ValueError(f"{type(self).__name__} compares with no reference: write another kl_loss_type than full")

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model without its adapters: the reference policy under LoRA."""
        raise RuntimeError(f"{type(self).__name__} holds no adapter: model.lora_rank is 0")

    # ---- optimizer

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop the accumulated gradient."""

    def optimizer_step(self) -> float:
        """Clip and apply the gradient; returns its norm. A step with a non-finite norm is skipped."""
        if self.optimizer_config is None:
            raise RuntimeError(f"this engine only infers: it has no optimizer ({self.config_key}.forward_only)")
        gradients, norm = self._reduce_gradients()
        if not math.isfinite(norm):
            self.skipped_steps += 1
            logger.warning("the gradient norm is not finite: optimizer step skipped, %d so far", self.skipped_steps)
        else:
            # The norm is equal on all ranks, so all skip or all step.
            scale_to_norm(gradients, norm, self.optimizer_config.clip_grad)
            self._apply_gradients()
            self.weights_version += 1
        self.optimizer_zero_grad()
        return norm

    def _reduce_gradients(self) -> tuple[list[Tensor], float]:
        """Return this rank's part of the reduced gradient, and the norm of the whole; collective."""
        raise self._missing("_reduce_gradients")

    def _apply_gradients(self) -> None:
        """Step the optimizer with the present gradients."""
        raise self._missing("_apply_gradients")

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the learning rate that the last optimizer step used."""

    @property
    def keeps_settings(self) -> bool:
        """Whether a loaded optimizer keeps the checkpoint's settings if the configuration differs."""
        return self.optimizer_config is not None and self.optimizer_config.use_checkpoint_opt_param_scheduler

    @property
    def schedule_steps(self) -> int:
        """Number of steps that the learning-rate schedule has taken; checkpoints restore it."""
        return 0

    def adopt(self, module: Any, optimizer: Any, lr_scheduler: Any) -> None:
        """Replace model, optimizer and schedule by those that the user's code has built or changed.

        Raises: ValueError for an engine that cannot take another model, optimizer or schedule.
        """
        for name, part in (("module", module), ("optimizer", optimizer), ("lr_scheduler", lr_scheduler)):
            if part is not getattr(self, name):
                kind = type(self).__name__
                raise WrongInput(f"_build_model_optimizer returned another {name}, which {kind} cannot take")

    def _no_schedule(self) -> RuntimeError:
        return RuntimeError(f"this engine only infers: it has no schedule ({self.config_key}.forward_only)")

    # ---- weights

    @abstractmethod
    def named_weights(
        self, adapter_only: bool = False, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) in a fixed order, one tensor alive at a time.

        Collective: every rank drains it. Adapters are merged into the weights that they adapt; ``adapter_only`` yields
        the adapters alone. ``before`` is told the bytes of each tensor before it is gathered, so that the caller can
        make room; it must not wait for other ranks.
        """

    def sent_weights(
        self, agree: AgreeOnDtypes, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield like ``named_weights`` for a receiver that holds most tensors in a smaller dtype; collective.

        An engine that gathers its weights asks once for the dtypes in which the receiver holds the tensors that it
        makes of each parameter, and casts before it gathers. The receiver then has the same bits as if it had cast the
        tensors itself. Tensors that need arithmetic, such as merged adapters, are cast afterwards. This base class
        leaves the casts to the receiver.
        """
        return self.named_weights(before=before)

    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) of this rank: a part of the model or a sharded whole. Not collective."""
        return iter(())

    def resident_weights(self) -> dict[str, Tensor]:
        """Return the tensors in which this rank holds the whole model, by checkpoint name; not copies.

        Raises: WrongInput when it holds a part, or a tensor in another form than a checkpoint.
        """
        raise WrongInput(f"{type(self).__name__} does not hold its weights as a checkpoint does")

    def move_weights(self, places: Mapping[str, Tensor]) -> None:
        """Copy the weights to ``places``, by the names of ``resident_weights``; from then on they live there."""
        raise WrongInput(f"{type(self).__name__} cannot move its weights into the memory of another engine")

    # ---- checkpoints

    @cached_property
    def checkpoint_manager(self) -> "BaseCheckpointManager":
        """Write and read the parts that ``checkpoint_config`` names."""
        raise self._missing("checkpoint_manager")

    @abstractmethod
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint; collective."""

    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Complete an asynchronous save; returns whether none is left. Collective.

        Without ``wait``, complete it only if all ranks have written their files.
        """
        return True

    def keep_latest_checkpoints(self, local_path: str, max_ckpt_to_keep: int | None) -> None:
        """Keep the newest ``max_ckpt_to_keep`` complete checkpoints, the one at ``local_path`` included.

        None or 0 keeps all. Not collective. Call it after the tracker names the new checkpoint as the latest.
        """
        self.checkpoint_manager.keep_latest(local_path, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore this rank's part of a checkpoint; collective."""
        with self._on_device("model", "optimizer"):
            self.checkpoint_manager.load_checkpoint(
                local_path=local_path, hdfs_path=hdfs_path, del_local_after_load=del_local_after_load
            )
        self.weights_version += 1

    # ---- layout

    def get_data_parallel_rank(self) -> int:
        """Return which shard of a batch this rank takes."""
        return self.shares.dp_rank

    def get_data_parallel_size(self) -> int:
        """Return into how many shards a batch is cut."""
        return self.shares.dp_size

    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Return the ranks that hold the other shards; None if there is only one shard."""
        return self.shares.dp_group if self.shares.dp_size > 1 else None

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are the ones collected."""
        return True
