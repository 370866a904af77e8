"""One forward pass over a micro-batch, packed or padded, with or without sequence parallelism."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.models.transformers.attention import PackedSequences
from verl.models.transformers.dense_common import HeadRequest
from verl.models.transformers.vision import MEDIA, Media
from verl.utils.activation_offload import offloaded_activations
from verl.utils.numerics.full_kl import full_kl
from verl.utils.torch_functional import log_probs_and_entropy
from verl.utils.ulysses import all_gather_tensor, set_ulysses_sequence_parallel_group, ulysses_pad
from verl.utils.vision.multi_modal import concat_distinct_inputs, concat_multi_modal_inputs
from verl.workers.engine.fsdp.layout import Layout
from verl.workers.engine.micro_batch import PackedRows, pack_rows, response_mask_of, tensors_of, unpack

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.workers.engine.base import ModelOutput

_SHOWN = "shown"  # among the inputs of a multi-modal model: ``Media.shown``


@dataclass(frozen=True)
class ForwardOptions:
    """What does not change from batch to batch; a token is read ``lead`` positions before its own.

    ``takes_media`` says that the model merges images itself (``verl.models.transformers.vision``), ``fused_head`` that
    it scores tokens without logits (``verl.models.transformers.dense_common``).
    """

    remove_padding: bool
    is_value_model: bool
    lead: int = 1
    takes_media: bool = False
    fused_head: bool = False
    entropy_chunk_size: int | None = None
    offload_activations: bool = False


@dataclass(frozen=True)
class Scoring:
    """What is asked of the distribution at each position; ``entropy`` is ``none``, ``value`` or ``grad``."""

    temperature: float
    entropy: str

    @classmethod
    def of(cls, meta: dict[str, Any]) -> "Scoring":
        """Read the meta data of a batch."""
        entropy = "none"
        if meta.get("calculate_entropy", False):
            entropy = "grad" if meta.get("entropy_needs_grad", True) and torch.is_grad_enabled() else "value"
        return cls(meta.get("temperature", 1.0), entropy)


class Forward:
    """Runs the model so that logits exist only at the positions at which a counted token is read."""

    def __init__(self, module: nn.Module, layout: Layout, options: ForwardOptions) -> None:
        self.module = module
        self.layout = layout
        self.options = options
        self.reference: Reference | None = None

    def __call__(self, rows: "DataProto") -> "ModelOutput":
        """Return (b, R) outputs on the device, zero outside the response mask."""
        reference = self._reference_of(rows.meta_info)
        ref_logits = None if reference is None else reference.logits(rows)
        # A divergence from the reference is one of logits, which a fused head does not make.
        fused = Scoring.of(rows.meta_info) if self.options.fused_head and reference is None else None
        with self._activations():
            return self._outputs(*self._read(rows, fused), rows.meta_info, ref_logits, fused)

    def _reference_of(self, meta: dict[str, Any]) -> "Reference | None":
        if not meta.get("calculate_full_kl", False):
            return None
        if self.reference is None:
            raise ValueError("calculate_full_kl needs a reference in this engine: call set_reference")
        return self.reference

    def _read(self, rows: "DataProto", fused: Scoring | None) -> tuple[PackedRows, Tensor, Tensor, Tensor]:
        """Return the packed rows, and of this rank's positions logits (k, V), labels (k,) and targets (k,).

        With ``fused`` the columns of the logits are the log-probability of the label and, where asked, the entropy.
        """
        device, batch = self.layout.device, tensors_of(rows)
        names = ("input_ids", "attention_mask", "position_ids")
        ids, attention, positions = (batch[name].to(device, non_blocking=True) for name in names)
        asked = response_mask_of(rows).to(device, non_blocking=True)
        packed = pack_rows(ids, attention, positions, asked, self.options.lead)
        inputs = self._multi_modal_inputs(rows, packed.row_order if self.options.remove_padding else None)
        if not self.options.remove_padding:
            return packed, *self._padded(packed, ids, attention, positions, asked, inputs, fused)
        if self.layout.sp_size > 1:
            return packed, *self._sliced(packed, inputs, fused)
        return packed, *self._packed(packed, inputs, fused)

    def idle(self, meta: dict[str, Any] | None = None) -> Tensor:
        """Take part in the collectives of a forward pass without any row; returns a zero that has a gradient."""
        reference = self._reference_of(meta or {})
        if reference is not None:
            reference.idle()
        device, tokens = self.layout.device, self.layout.sp_size
        ids = torch.zeros(1, tokens, dtype=torch.long, device=device)
        mask = torch.ones(1, tokens, dtype=torch.long, device=device)
        positions = torch.arange(tokens, device=device).unsqueeze(0)
        packed = pack_rows(ids, mask, positions, torch.zeros_like(ids))
        with self._activations():
            if not self.options.remove_padding:
                logits, _, _ = self._padded(packed, ids, mask, positions, torch.zeros_like(ids), {})
            elif self.layout.sp_size > 1:
                logits, _, _ = self._sliced(packed, {})
            else:
                logits, _, _ = self._packed(packed, {})
        return logits.sum() * 0.0

    # ---- three ways to the logits: each returns (logits (k, V), labels (k,), targets (k,)) of this rank's positions

    def _packed(
        self, packed: PackedRows, inputs: dict[str, Any], fused: Scoring | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        sequences = PackedSequences(packed.lengths, self.layout.device)
        extra = self._extra(inputs, self._sampled(packed, packed.input_ids))
        kept = self._kept(packed.keep, packed.labels, fused)
        logits = self._run(packed.input_ids, None, packed.position_ids, kept, sequences, extra)
        return logits, packed.labels, packed.target

    def _sliced(
        self, packed: PackedRows, inputs: dict[str, Any], fused: Scoring | None = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        sp_size, sp_rank = self.layout.sp_size, self.layout.sp_rank
        ids, positions, padding = ulysses_pad(packed.input_ids, packed.position_ids, sp_size)
        assert positions is not None
        lengths = [*packed.lengths, padding] if padding else packed.lengths
        sequences = PackedSequences(lengths, self.layout.device)
        width = ids.shape[1] // sp_size
        start = sp_rank * width
        mine = (packed.keep >= start) & (packed.keep < start + width)
        extra = self._extra(inputs, self._sampled(packed, ids), (start, width))
        if not self.options.takes_media:  # which slices after images have taken their places
            ids, positions = ids.narrow(-1, start, width), positions.narrow(-1, start, width)
        kept = self._kept(packed.keep[mine] - start, packed.labels[mine], fused)
        logits = self._run(ids, None, positions, kept, sequences, extra)
        return logits, packed.labels[mine], packed.target[mine]

    def _padded(
        self,
        packed: PackedRows,
        ids: Tensor,
        attention: Tensor,
        positions: Tensor,
        asked: Tensor,
        inputs: dict[str, Any],
        fused: Scoring | None = None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Run whole rows; a head sees only the response, whose counted positions are picked afterwards, a fused head
        these alone.
        """
        if positions.dim() == 3:
            positions = positions.transpose(0, 1)
        rows, width = packed.shape
        length = ids.shape[1]
        before = length - width - self.options.lead
        first = max(before, 0)
        columns = torch.arange(first, length, device=ids.device)
        extra = self._extra(inputs, F.pad(asked.bool(), (length - width, 0)))
        row, column = packed.target // width, packed.target % width
        if fused is not None:
            kept = self._kept(row * length + column + before, packed.labels, fused)
            return self._run(ids, attention, positions, kept, None, extra), packed.labels, packed.target
        hidden = self._run(ids, attention, positions, columns, None, extra)
        at = row * len(columns) + column + (before - first)
        return hidden.reshape(rows * len(columns), -1).index_select(0, at), packed.labels, packed.target

    def _sampled(self, packed: PackedRows, ids: Tensor) -> Tensor:
        """Mark the counted tokens among packed ones (1, T)."""
        return torch.zeros_like(ids, dtype=torch.bool).index_fill(1, packed.keep + self.options.lead, True)

    def _multi_modal_inputs(self, rows: "DataProto", order: Tensor | None) -> dict[str, Any]:
        """Join the processor's outputs of the rows, in the order in which they are packed.

        A model that takes media is also told under ``_SHOWN`` which rows show what: rows may share their images.
        """
        column = rows.non_tensor_batch.get("multi_modal_inputs")
        if column is None:
            return {}
        ordered = list(column) if order is None else [column[at] for at in order.tolist()]
        if not self.options.takes_media:
            return self._on_device(concat_multi_modal_inputs(ordered))
        inputs, shown = concat_distinct_inputs(ordered)
        return self._on_device(inputs) | {_SHOWN: shown}

    def _on_device(self, inputs: dict[str, Any]) -> dict[str, Any]:
        device = self.layout.device
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def _extra(self, inputs: dict[str, Any], sampled: Tensor, window: tuple[int, int] | None = None) -> dict[str, Any]:
        """Return what a multi-modal model is given besides tokens."""
        if not self.options.takes_media:
            return inputs
        return {MEDIA: Media(sampled, inputs, inputs.get(_SHOWN, {}), window)}

    def _kept(self, at: Tensor, labels: Tensor, fused: Scoring | None) -> Tensor | HeadRequest:
        """Return what the head is told of the positions."""
        return at if fused is None else HeadRequest(at, labels, fused.temperature, fused.entropy)

    def _run(
        self,
        ids: Tensor,
        attention: Tensor | None,
        positions: Tensor,
        keep: Tensor | HeadRequest,
        sequences: PackedSequences | None,
        extra: dict[str, Any],
    ) -> Tensor:
        kwargs: dict[str, Any] = dict(extra)
        if sequences is not None:
            kwargs["packed_sequences"] = sequences
            kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_k"] = sequences.cu_seqlens
            kwargs["max_length_q"] = kwargs["max_length_k"] = sequences.max_length
        if isinstance(keep, HeadRequest):
            kwargs["head_request"] = keep
        elif not self.options.is_value_model:
            kwargs["logits_to_keep"] = keep
        output = self.module(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False, **kwargs)
        if isinstance(keep, HeadRequest):
            scores = (output.log_probs, output.entropy)
            return torch.stack([each for each in scores if each is not None], dim=1)
        logits: Tensor = output.logits
        if self.options.is_value_model:
            logits = logits.index_select(1, keep)
        return logits.squeeze(0) if sequences is not None else logits

    # ---- outputs

    def _outputs(
        self,
        packed: PackedRows,
        logits: Tensor,
        labels: Tensor,
        target: Tensor,
        meta: dict[str, Any],
        ref_logits: Tensor | None,
        fused: Scoring | None,
    ) -> "ModelOutput":
        if self.options.is_value_model:
            values = {"values": logits[:, 0].float()}
        elif fused is not None:
            values = dict(zip(("log_probs", "entropy"), logits.unbind(1), strict=False))
        else:
            values = self._log_probs(logits, labels, meta, shared=ref_logits is not None)
        if ref_logits is not None:
            temperature, chunk = meta.get("temperature", 1.0), self.options.entropy_chunk_size
            values["full_kl"] = full_kl(logits, ref_logits, temperature, chunk)
        output = {name: unpack(value, target, packed.shape) for name, value in values.items()}
        if self.layout.sp_size > 1:  # every position is on one rank and zero on the others
            output = {
                name: all_gather_tensor(value.unsqueeze(0), 0, self.layout.sp_group).sum(0)
                for name, value in output.items()
            }
        return output

    def _log_probs(self, logits: Tensor, labels: Tensor, meta: dict[str, Any], shared: bool) -> dict[str, Tensor]:
        """Return log-probabilities and entropies; ``shared`` logits are left as they are in the backward pass."""
        asked = Scoring.of(meta)
        log_probs, entropies = log_probs_and_entropy(
            logits,
            labels,
            asked.temperature,
            entropy=asked.entropy,
            chunk_size=self.options.entropy_chunk_size,
            inplace_backward=not shared,
        )
        return {"log_probs": log_probs} if entropies is None else {"log_probs": log_probs, "entropy": entropies}

    def _activations(self) -> AbstractContextManager[Any]:
        if self.options.offload_activations and torch.is_grad_enabled():
            return offloaded_activations(self.module, pin_memory=self.layout.device.type != "cpu")
        return nullcontext()


class Reference:
    """The distribution of a reference policy, from passes of its own over the rows of a micro-batch.

    Args: ``context`` is entered around each pass, such as the one that takes adapters out.
    """

    def __init__(self, forward: Forward, context: Callable[[], AbstractContextManager[Any]] = nullcontext) -> None:
        self.forward = forward
        self.context = context

    def logits(self, rows: "DataProto") -> Tensor:
        """Return the logits (k, V) at the positions that the policy is asked for, without gradient."""
        with torch.no_grad(), self.context():
            return self.forward._read(rows, None)[1]

    def idle(self) -> None:
        """Take part in the collectives of ``logits``."""
        with torch.no_grad(), self.context():
            self.forward.idle()


@contextmanager
def sequence_parallel(layout: Layout) -> Iterator[None]:
    """Let attention exchange heads within this rank's group; spans the backward pass, which may recompute it."""
    previous = set_ulysses_sequence_parallel_group(layout.sp_group)
    try:
        yield
    finally:
        set_ulysses_sequence_parallel_group(previous)
