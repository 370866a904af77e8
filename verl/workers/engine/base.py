"""The training engine: what every backend does for every role."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.distributed import ProcessGroup

from verl.algos.aggregate import Metric, Sum
from verl.utils.device import get_device_name
from verl.utils.flops_counter import AdapterSizes

if TYPE_CHECKING:
    from verl.protocol import DataProto

ModelOutput = dict[str, Tensor]
"""``log_probs`` (and ``entropy`` where asked for) or ``values``, each (b, R) and zero outside the response mask."""

LossFn = Callable[[ModelOutput, "DataProto"], tuple[list[Sum], dict[str, Metric]]]
"""Takes the output for a micro-batch and its rows; returns the terms of the loss and its metrics."""

_IMPORTED_WHEN_ASKED_FOR = {"megatron": "verl.workers.engine.megatron"}
"""Backends that are optional, or slow to import, and the module that registers their engines."""


class BaseEngine(ABC):
    """A model with its optimizer, laid out over the ranks of this process group.

    Batches are padded ``DataProto`` shards of this data-parallel rank: ``input_ids``, ``attention_mask`` (B, L),
    ``position_ids`` (B, L) or (B, C, L), ``responses`` (B, R) and, where not all of the response counts,
    ``response_mask`` (B, R). Padding removal, micro-batching and parallelism stay inside. How a batch is cut is read
    from its ``meta_info``: ``use_dynamic_bsz``, ``micro_batch_size_per_gpu``, ``max_token_len_per_gpu``,
    ``temperature``, ``calculate_entropy`` and ``calculate_full_kl``. Rows may hold images and videos as
    ``multi_modal_inputs``, the outputs of the model's processor.
    """

    freeze_vision_tower = False
    load_weight = True
    """Set before ``initialize``: whether the vision tower of the model keeps its weights."""
    adapter_sizes: AdapterSizes | None = None
    """Set by ``initialize``: how large adapters are, where only these learn."""

    @abstractmethod
    def initialize(self) -> None:
        """Build the model, optimizer and schedule, and load the pretrained weights."""

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Hold parameters, gradients and optimizer state on the device, dropout on."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Hold parameters on the device, dropout off."""

    @abstractmethod
    def train_batch(self, data: "DataProto", loss_fn: LossFn) -> dict[str, float]:
        """Take one optimizer step on a mini-batch.

        Returns: the metrics of ``loss_fn`` over the global mini-batch, equal on every rank, and ``grad_norm``.
        """

    @abstractmethod
    def forward_backward_batch(
        self, data: "DataProto", loss_fn: LossFn, forward_only: bool = False
    ) -> dict[str, float]:
        """Accumulate the gradient of a mini-batch without a step, or only its metrics."""

    @abstractmethod
    def infer_batch(self, data: "DataProto") -> ModelOutput:
        """Run the model without gradient; outputs are (B, R) on the CPU, in the order of the rows."""

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Drop the accumulated gradient."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip and apply the gradient; returns its norm. A step with a non-finite norm is skipped."""

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the learning rate that the last optimizer step used."""

    @abstractmethod
    def named_weights(
        self, adapter_only: bool = False, before: Callable[[int], None] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield (checkpoint name, full tensor) in a fixed order, one tensor alive at a time.

        Collective: every rank drains it. Adapters are merged into the weights that they adapt, unless
        ``adapter_only`` asks for them alone. ``before`` is told the bytes of each tensor before it is gathered, so that
        room can be made; it may not wait for other ranks.
        """

    def local_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, parameter) of what this rank holds, a part of the model or a sharded whole; not collective."""
        return iter(())

    @property
    @abstractmethod
    def weights_version(self) -> int:
        """Count the changes of the weights: optimizer steps and loaded checkpoints."""

    @abstractmethod
    def save_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, global_step: int = 0, max_ckpt_to_keep: int | None = None
    ) -> None:
        """Write this rank's part of a checkpoint; collective."""

    def finish_checkpoint(self, wait: bool = True) -> bool:
        """Complete a save that goes on beside training; returns whether none is left. Collective.

        Without ``wait``, only if all ranks have written their files.
        """
        return True

    @abstractmethod
    def keep_latest_checkpoints(self, local_path: str, max_ckpt_to_keep: int | None) -> None:
        """Remove the oldest complete checkpoints, so that so many are left with the one at ``local_path``.

        None or 0 keeps all. Not collective; for a caller that names the new one as the latest first.
        """

    @abstractmethod
    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        """Restore this rank's part of a checkpoint; collective."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move parameters and optimizer state to ``device``."""

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Return which shard of a batch this rank takes."""

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Return into how many shards a batch is cut."""

    @abstractmethod
    def get_data_parallel_group(self) -> ProcessGroup | None:
        """Return the ranks that hold the other shards; None where there is one."""

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Whether this rank's outputs are the ones collected."""
        return True

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Run the base model without its adapters; the reference policy under LoRA."""
        raise RuntimeError(f"{type(self).__name__} holds no adapter: model.lora_rank is 0")

    def set_reference(self, engine: "BaseEngine | None") -> None:
        """Return ``full_kl``, the exact divergence from another engine's distribution at each token, where
        ``calculate_full_kl`` of a batch asks for it; None is this engine without its adapters.
        """
        raise ValueError(f"{type(self).__name__} compares with no reference: write another kl_loss_type than full")


class EngineRegistry:
    """Engines by what they model, their backend and the device."""

    _engines: dict[tuple[str, str, str], type[BaseEngine]] = {}

    @classmethod
    def register(
        cls, model_type: str, backend: str | list[str], device: str | list[str] = "cuda"
    ) -> Callable[[type[BaseEngine]], type[BaseEngine]]:
        """Enter the decorated class under every combination of the given names."""
        backends = [backend] if isinstance(backend, str) else backend
        devices = [device] if isinstance(device, str) else device

        def enter(engine: type[BaseEngine]) -> type[BaseEngine]:
            for name in backends:
                for kind in devices:
                    cls._engines[model_type, name, kind] = engine
            return engine

        return enter

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type[BaseEngine]:
        """Return the engine for the current device.

        Raises: ValueError, which is also an AssertionError, when there is none.
        """
        if backend in _IMPORTED_WHEN_ASKED_FOR:
            importlib.import_module(_IMPORTED_WHEN_ASKED_FOR[backend])
        key = (model_type, backend, get_device_name())
        if key not in cls._engines:
            raise UnknownEngineError(
                f"no engine for (model_type, backend, device) {key}; known: {sorted(cls._engines)}"
            )
        return cls._engines[key]

    @classmethod
    def new(cls, model_type: str, backend: str, *args: Any, **kwargs: Any) -> BaseEngine:
        """Construct the engine for the current device."""
        return cls.get_engine_cls(model_type, backend)(*args, **kwargs)


class UnknownEngineError(ValueError, AssertionError):
    """No engine is registered for what was asked."""
