"""One forward pass over a micro-batch, packed or padded, with or without sequence parallelism."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from verl.base_config import ConfigError, Violation
from verl.models.transformers.balancing import Balancing
from verl.models.transformers.dense_common import HeadRequest
from verl.models.transformers.packed_sequences import PackedSequences
from verl.models.transformers.packing import ignorant_of_rows
from verl.models.transformers.rope import RowRope, packed_row_lengths, row_lengths
from verl.models.transformers.token_inputs import TokenInputs
from verl.models.transformers.vision import MEDIA, Media
from verl.protocol import DataProto, tensors_of
from verl.utils.activation_offload import offloaded_activations
from verl.utils.model import CausalLMOutputForPPO
from verl.utils.numerics.log_probs import full_kl, log_probs_and_entropy
from verl.utils.ulysses import all_gather_tensor, set_ulysses_sequence_parallel_group, ulysses_pad
from verl.utils.vision.multi_modal import concat_multi_modal_inputs, resolve
from verl.workers.engine import passes
from verl.workers.engine.fsdp.layout import Layout

if TYPE_CHECKING:
    from verl.workers.engine.base import ModelOutput

_SHOWN, _ROWS = "shown", "rows"  # fields of ``Media`` among the inputs of a multi-modal model

ModelInputs = dict[str, Any]  # keyword arguments of a transformers model: tensors, and objects of our patches


class Read(NamedTuple):
    """The model's output at this rank's positions: ``logits`` (k, V), or the columns of a fused head.

    ``labels`` (k,) are the tokens that these positions predict, ``target`` (n,) their indices in the flattened (b, R)
    response. With ``readers`` (n,) target i takes the value of position ``readers[i]``; otherwise n = k, and target i
    takes the value of position i. ``aux_loss`` is the load-balancing loss of the experts over all tokens of the pass.
    """

    logits: Tensor
    labels: Tensor
    target: Tensor
    readers: Tensor | None = None
    aux_loss: Tensor | None = None


class Ran(NamedTuple):
    """The logits of one call of the model, or the columns of its fused head, and the balancing loss of its experts."""

    logits: Tensor
    aux_loss: Tensor | None


@dataclass(eq=False)
class Forward:
    """Run the model so that logits exist only where a counted token is read.

    A head over the whole sequence would make (T, V) logits, the largest tensor of a pass. Most of them are for the
    prompt and padding, which no loss reads.

    Args:
        lead: a token is read this many positions before itself.
        takes_media: the model merges images itself (``verl.models.transformers.vision``).
        fused_head: the head scores tokens without making logits (``verl.models.transformers.dense_common``).
        shares_prefixes: tokens with which several rows begin pass through the model once.
        asks_for_rows: the name of the model in errors, if its attention must ask where packed rows begin; None if the
            model learns it in another way.
        balancing: the loss of the model's experts that a gradient needs; None if its configuration asks for none.
        rope: the rotary positions whose frequencies depend on the length of a row.
        token_inputs: what a vision-language model takes for each token, if it does not take ``Media``.
        reference: the policy that ``PassSpec.full_kl`` compares with.
        segments: what passes with shared prefixes have computed, see ``BaseEngine.take_segments``; those of a
            reference do not count.
        images: the images that passes have computed, by patches, see ``BaseEngine.take_images``.
    """

    module: nn.Module
    layout: Layout
    remove_padding: bool
    is_value_model: bool
    lead: int
    takes_media: bool
    fused_head: bool
    entropy_chunk_size: int | None
    offload_activations: bool
    shares_prefixes: bool = False
    asks_for_rows: str | None = None
    balancing: Balancing | None = None
    rope: RowRope | None = None
    token_inputs: TokenInputs | None = None
    reference: "Reference | None" = None
    segments: list[passes.Segment] = field(default_factory=list)
    images: Counter[int] = field(default_factory=Counter)

    def __call__(self, rows: DataProto, spec: passes.PassSpec) -> "ModelOutput":
        """Return (b, R) outputs on the device, zero outside the response mask."""
        reference = self._reference_of(spec)
        ref_logits = None if reference is None else reference.logits(rows)
        # The divergence from a reference needs logits, which a fused head does not make.
        fused = spec if self.fused_head and reference is None else None
        with self._activations():
            packed, (logits, labels, target, readers, aux_loss) = self.read(rows, fused)
            self.segments.extend(packed.segments or ())
            self.images.update(passes.images_of(rows))
            if self.is_value_model:
                values = {"values": logits[:, 0].float()}
            elif fused is not None:
                values = passes.named_scores(logits.unbind(1))
            else:
                scores = log_probs_and_entropy(
                    logits,
                    labels,
                    spec.temperature,
                    entropy=spec.entropy_mode,
                    chunk_size=self.entropy_chunk_size,
                    # The backward pass writes the gradient over the logits, unless the full KL reads them too.
                    inplace_backward=ref_logits is None,
                )
                values = passes.named_scores(scores)
            if ref_logits is not None:
                values["full_kl"] = full_kl(logits, ref_logits, spec.temperature, self.entropy_chunk_size)
            outputs = passes.whole_outputs(values, target, packed.shape, self.layout.sp_group, readers)
            return outputs if aux_loss is None else outputs | {passes.AUX_LOSS: aux_loss}

    def idle(self, spec: passes.PassSpec) -> Tensor:
        """Take part in the collectives of a forward pass without any row; returns a zero that has a gradient."""
        reference = self._reference_of(spec)
        if reference is not None:
            reference.idle()
        with self._activations():
            _, read = self.read(passes.idle_rows(self.layout.sp_size, self.layout.device), None)
        return read.logits.sum() * 0.0

    def read(self, rows: DataProto, fused: passes.PassSpec | None) -> tuple[passes.PackedRows, Read]:
        """Return the packed rows and the model's output at this rank's positions.

        With ``fused`` the columns are the log-probability of the label and, on request, the entropy.
        """
        pack = passes.pack_shared_rows if self.shares_prefixes else passes.pack_rows
        packed = pack(rows, self.lead)
        order = packed.row_order if packed.media_order is None else packed.media_order
        inputs = self._multi_modal_inputs(rows, order if self.remove_padding else None)
        if self.remove_padding:
            if self.token_inputs is not None and inputs:
                self.token_inputs.check_packed(tensors_of(rows)["position_ids"].dim() == 3)
            return packed, self._packed(packed, inputs, fused)
        return packed, self._padded(packed, rows, inputs, fused)

    def _reference_of(self, spec: passes.PassSpec) -> "Reference | None":
        if spec.full_kl and self.reference is None:
            raise ValueError("full_kl needs a reference in this engine: call set_reference")
        return self.reference if spec.full_kl else None

    # ---- two ways to the logits

    def _packed(self, packed: passes.PackedRows, inputs: ModelInputs, fused: passes.PassSpec | None) -> Read:
        """Run the packed rows or, with sequence parallelism, this rank's slice of them.

        The ranks of a sequence exchange heads in attention (Ulysses). Elsewhere each rank works on a contiguous slice
        of the packed tokens, so it also scores only the positions of its slice.
        """
        sp_size = self.layout.sp_size
        ids, positions, padding = ulysses_pad(packed.input_ids, packed.position_ids, sp_size)
        assert positions is not None
        lengths = packed.lengths
        ends = packed.ends
        if padding:
            lengths = [*lengths, padding]
            ends = None if ends is None else [*ends, ids.shape[1]]
        sampled = F.pad(packed.sampled, (0, padding)).unsqueeze(0)
        rows = packed_row_lengths(positions, lengths) if self._chooses_by_row else None
        window = None
        start = 0
        mine: Tensor | slice = slice(None)
        if sp_size > 1:
            width = ids.shape[1] // sp_size
            start = self.layout.sp_rank * width
            window = (start, width)
            mine = (packed.keep >= start) & (packed.keep < start + width)
            rows = None if rows is None else rows.narrow(-1, start, width)
            if not self.takes_media:  # such a model slices itself, after it has merged the images
                ids = ids.narrow(-1, start, width)
                positions = positions.narrow(-1, start, width)
        kept: Tensor | HeadRequest = packed.keep[mine] - start
        if fused is not None:
            kept = HeadRequest(packed.keep[mine] - start, packed.labels[mine], fused.temperature, fused.entropy_mode)
        extra = self._extra(inputs, sampled, packed.place, window)
        sequences = PackedSequences(lengths, self.layout.device, ends)
        with self._rows(rows):
            logits, aux_loss = self._run(ids, None, positions, kept, sequences, extra, packed.input_ids.shape[1])
        if packed.readers is None:
            return Read(logits, packed.labels[mine], packed.target[mine], aux_loss=aux_loss)
        if isinstance(mine, slice):
            return Read(logits, packed.labels, packed.target, packed.readers)
        here = mine[packed.readers]
        return Read(logits, packed.labels[mine], packed.target[here], (mine.cumsum(0) - 1)[packed.readers[here]])

    def _padded(
        self, packed: passes.PackedRows, data: DataProto, inputs: ModelInputs, fused: passes.PassSpec | None
    ) -> Read:
        """Run whole rows.

        An ordinary head sees the response columns, from which the counted positions are picked afterwards; a fused
        head sees the counted positions alone.
        """
        batch = tensors_of(data)
        ids = batch["input_ids"]
        attention = batch["attention_mask"]
        given = batch["position_ids"]
        if given.dim() == 3:
            given = given.transpose(0, 1)
        counts_own = given.dim() == 2 and self.token_inputs is not None and self.token_inputs.has_axes and bool(inputs)
        positions = None if counts_own else given  # otherwise the rows would get the positions of text
        rows, width = packed.shape
        length = ids.shape[1]
        before = length - width - self.lead
        first = max(before, 0)
        columns = torch.arange(first, length, device=ids.device)
        sampled = F.pad(passes.response_mask_of(data).bool(), (length - width, 0))
        place = torch.arange(rows * length, device=ids.device).view(rows, length).masked_fill(attention == 0, -1)
        extra = self._extra(inputs, sampled, place)
        if self.token_inputs is not None:
            extra = extra | self.token_inputs.inputs(ids, sampled, bool(inputs))
        row = packed.target // width
        column = packed.target % width
        kept: Tensor | HeadRequest = columns
        if fused is not None:
            kept = HeadRequest(row * length + column + before, packed.labels, fused.temperature, fused.entropy_mode)
        with self._rows(row_lengths(given, attention) if self._chooses_by_row else None):
            logits, aux_loss = self._run(ids, attention, positions, kept, None, extra, attention.numel())
        if fused is not None:
            return Read(logits, packed.labels, packed.target, aux_loss=aux_loss)
        at = row * len(columns) + column + (before - first)
        logits = logits.reshape(rows * len(columns), -1).index_select(0, at)
        return Read(logits, packed.labels, packed.target, aux_loss=aux_loss)

    def _multi_modal_inputs(self, rows: DataProto, order: Tensor | None) -> ModelInputs:
        """Join the processor's outputs of the rows, in the order in which they are packed.

        Rows may share images: ``_SHOWN`` tells a model that takes media which rows show which.
        """
        column = rows.non_tensor_batch.get("multi_modal_inputs")
        if column is None:
            return {}
        device = self.layout.device
        ordered = column if order is None else [column[at] for at in order.tolist()]
        if self.takes_media:
            found, shown = passes.media_of(rows, order, device)
            return found | {_SHOWN: shown, _ROWS: resolve(ordered)}
        inputs = concat_multi_modal_inputs(ordered)
        return {name: value.to(device) if isinstance(value, Tensor) else value for name, value in inputs.items()}

    def _extra(
        self, inputs: ModelInputs, sampled: Tensor, place: Tensor, window: tuple[int, int] | None = None
    ) -> ModelInputs:
        """Return the inputs of a multi-modal model other than tokens."""
        if not self.takes_media:
            return inputs
        return {MEDIA: Media(sampled, inputs, inputs.get(_SHOWN, {}), window, inputs.get(_ROWS, ()), place)}

    def _run(
        self,
        ids: Tensor,
        attention: Tensor | None,
        positions: Tensor | None,
        keep: Tensor | HeadRequest,
        sequences: PackedSequences | None,
        extra: ModelInputs,
        num_tokens: int,
    ) -> Ran:
        kwargs = dict(extra)
        if sequences is not None:
            kwargs["packed_sequences"] = sequences
            kwargs["cu_seq_lens_q"] = kwargs["cu_seq_lens_k"] = sequences.cu_seqlens
            kwargs["max_length_q"] = kwargs["max_length_k"] = sequences.max_length
        if isinstance(keep, HeadRequest):
            kwargs["head_request"] = keep
        elif not self.is_value_model:
            kwargs["logits_to_keep"] = keep
        output = self.module(input_ids=ids, attention_mask=attention, position_ids=positions, use_cache=False, **kwargs)
        if self.asks_for_rows is not None and sequences is not None and not sequences.is_read:
            problem = ignorant_of_rows(self.asks_for_rows)
            raise ConfigError([Violation("model.use_remove_padding", True, problem)])
        aux_loss = self._aux_loss(output, attention, num_tokens)
        if isinstance(keep, HeadRequest):
            scores = (output.log_probs, output.entropy)
            return Ran(torch.stack([each for each in scores if each is not None], dim=1), aux_loss)
        logits: Tensor = output.logits
        if self.is_value_model:
            logits = logits.index_select(1, keep)
        return Ran(logits.squeeze(0) if sequences is not None else logits, aux_loss)

    def _aux_loss(self, output: Any, attention: Tensor | None, num_tokens: int) -> Tensor | None:
        """Return the balancing loss over the ``num_tokens`` of the pass, including tokens of other ranks and padding.

        A fused head leaves it out, and with sequence parallelism the model knows its slice only.
        """
        if self.balancing is None or not torch.is_grad_enabled():
            return None
        if self.layout.sp_size == 1 and not isinstance(output, CausalLMOutputForPPO):
            return self.balancing.of_output(output)
        logits = getattr(output, "router_logits", None) or ()
        whole = tuple(all_gather_tensor(each, 0, self.layout.sp_group)[:num_tokens] for each in logits)
        return self.balancing.of_routers(whole or None, attention)

    @property
    def _chooses_by_row(self) -> bool:
        return self.rope is not None and self.rope.length is None

    def _rows(self, lengths: Tensor | None) -> AbstractContextManager[None]:
        """Return a context in which RoPE chooses its frequencies by the lengths of rows, if they depend on it."""
        return nullcontext() if self.rope is None or lengths is None else self.rope.rows(lengths)

    def _activations(self) -> AbstractContextManager[None]:
        if self.offload_activations and torch.is_grad_enabled():
            return offloaded_activations(self.module, pin_memory=self.layout.device.type != "cpu")
        return nullcontext()


@dataclass(eq=False)
class Reference:
    """Run the reference policy on the micro-batches of the policy.

    Args: ``context`` is entered around each pass, for instance to disable adapters.
    """

    forward: Forward
    context: Callable[[], AbstractContextManager[None]] = nullcontext

    def logits(self, rows: DataProto) -> Tensor:
        """Return the logits (k, V) at the positions that the policy is asked for, without gradient."""
        with torch.no_grad(), self.context():
            return self.forward.read(rows, None)[1].logits

    def idle(self) -> None:
        """Take part in the collectives of ``logits``."""
        with torch.no_grad(), self.context():
            self.forward.idle(passes.PassSpec())


@contextmanager
def sequence_parallel(layout: Layout) -> Iterator[None]:
    """Let attention exchange heads within this rank's group.

    The context spans the backward pass too: with gradient checkpointing that computes attention again.
    """
    previous = set_ulysses_sequence_parallel_group(layout.sp_group)
    try:
        yield
    finally:
        set_ulysses_sequence_parallel_group(previous)
