"""One micro-batch through this rank's chunk of the model, and from the head of the last stage to the outputs."""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from verl.models.mcore.gpt.layers import HeadRequest, PackedRowParams, packed_row_params
from verl.models.mcore.gpt.vision import MediaRequest, axial_positions
from verl.models.mcore.packing import aligned_lengths, held_places, local_places, places_of
from verl.models.transformers.vision import Media
from verl.protocol import tensors_of
from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_and_entropy
from verl.workers.engine import passes
from verl.workers.engine.megatron.layout import Layout

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import MegatronModule

    from verl.protocol import DataProto
    from verl.workers.engine.base import ModelOutput


@dataclass(frozen=True)
class PackedShare:
    """One rank's part of packed rows.

    ``input_ids`` (1, t); ``lengths`` are those of the whole sequences with their padding. ``places`` (T,) are those of
    all tokens of the rows among the (t,) of this rank, before sequence parallelism cuts them; -1 for a token of another
    rank. ``keep`` (k,) are the places to read, with their ``labels`` and ``target`` (k,). A rank without counted tokens
    keeps one place without label and target: heads and collectives need a position. ``ends`` and ``readers`` are those
    of rows with shared prefixes, see ``PackedRows``.
    """

    input_ids: Tensor
    lengths: list[int]
    places: Tensor
    keep: Tensor
    labels: Tensor
    target: Tensor
    shape: tuple[int, int]
    ends: list[int] | None = None
    readers: Tensor | None = None


def share_of(packed: passes.PackedRows, cp_size: int, cp_rank: int, tp_multiple: int) -> PackedShare:
    """Align the sequences, pad the whole if needed, and take this rank's part.

    Context parallelism gives each rank two chunks of every sequence, one from its front and one from its back. Causal
    attention costs more towards the end of a sequence, so contiguous parts would leave the first ranks idle.
    """
    lengths = aligned_lengths(packed.lengths, cp_size, tp_multiple)
    keep = packed.keep
    ids = packed.input_ids[0]
    labels = packed.labels
    target = packed.target
    device = ids.device
    places = torch.arange(len(ids), device=device)
    if lengths != packed.lengths or cp_size > 1:
        place = places_of(packed.lengths, lengths)
        whole = ids.new_zeros(sum(lengths)).index_copy(0, place.to(device), ids)
        held = held_places(lengths, cp_size, cp_rank)
        places = local_places(packed.lengths, lengths, cp_size, cp_rank).to(device)
        ids = whole[held.to(device)]
        keep = places[keep]
        if cp_size > 1:  # other ranks read the rest; shared prefixes have one rank, and several targets for a label
            mine = keep >= 0
            keep = keep[mine]
            labels = labels[mine]
            target = target[mine]
    if not len(keep):
        keep = keep.new_zeros(1)
    ends = packed.ends
    if ends is not None and len(lengths) > len(ends):  # padding
        ends = [*ends, sum(lengths)]
    return PackedShare(ids.unsqueeze(0), lengths, places, keep, labels, target, packed.shape, ends, packed.readers)


@dataclass(frozen=True)
class Round:
    """One micro-batch of a pipeline schedule, on the device; None if this rank only takes part."""

    at: int
    micro_batch: passes.MicroBatch | None
    packed: passes.PackedRows
    share: PackedShare
    params: PackedRowParams


def check_positions(data: "DataProto") -> None:
    """Check that positions count the tokens of a row from 0, as Megatron-Core counts packed tokens of a text model.

    Raises: ValueError naming the first row whose positions do not.
    """
    batch = tensors_of(data)
    positions = batch["position_ids"]
    attention = batch["attention_mask"]
    if positions.dim() == 3:
        raise ValueError("position_ids of three dims (multi-modal rope) need a vision-language model, this is none")
    wrong = ((positions != attention.cumsum(-1) - 1) & attention.bool()).any(-1)
    if wrong.any():
        raise ValueError(
            f"position_ids of row {int(wrong.nonzero()[0])} do not count its tokens from 0, which strategy=megatron "
            "needs: write attention_mask.cumsum(-1) - 1"
        )


@dataclass(frozen=True)
class Forward:
    """Packs micro-batches and runs them so that logits exist only at positions that predict a counted token.

    With ``fuses_head`` the head scores tokens without making logits (``verl.models.mcore.gpt.layers.FusedHead``). With
    ``takes_axes`` the model has positions along three axes and a vision tower (``verl.models.mcore.gpt.vision``).
    """

    layout: Layout
    is_value_model: bool
    vocab_size: int
    sequence_parallel: bool
    lead: int
    fuses_head: bool
    takes_axes: bool
    shares_prefixes: bool = False
    segments: list[passes.Segment] = field(default_factory=list)
    images: Counter[int] = field(default_factory=Counter)

    def prepare(self, at: int, micro_batch: passes.MicroBatch | None, counts: bool = True) -> Round:
        """Pack a micro-batch; a missing one becomes a single token that does not count.

        Args: ``counts`` adds it to what passes compute: once for all chunks of this rank.
        """
        device = self.layout.device
        if micro_batch is None:
            packed = passes.pack_rows(passes.idle_rows(1, device))
        else:
            micro_batch = micro_batch.to(device)
            pack = passes.pack_shared_rows if self.shares_prefixes else passes.pack_rows
            packed = pack(micro_batch.rows, self.lead)
            if counts:
                self.segments.extend(packed.segments or ())
                self.images.update(passes.images_of(micro_batch.rows))
        tp_multiple = self.layout.tp_size if self.sequence_parallel else 1
        share = share_of(packed, self.layout.cp_size, self.layout.cp_rank, tp_multiple)
        longest = None if packed.ends is None else int(packed.position_ids.max()) + 1
        params = packed_row_params(share.lengths, device, share.ends, longest)
        return Round(at, micro_batch, packed, share, params)

    def run(self, model: "MegatronModule", chunk: "GPTModel", round_: Round, spec: passes.PassSpec) -> Tensor:
        """Return the output of this chunk: hidden states, or its head's logits (1, k, V / ranks) or values (1, k, 1).

        A fused head gives (1, k, 1 or 2): log-probabilities and, on request, entropies. ``model`` is the ``chunk``,
        wrapped when it trains.
        """
        if hasattr(chunk, "picker"):
            chunk.picker.keep = round_.share.keep
        if self.fuses_head and hasattr(chunk, "fused_head"):
            share = round_.share
            labels = share.labels if len(share.labels) else share.keep.new_zeros(len(share.keep))
            chunk.fused_head.request = HeadRequest(labels, spec.temperature, spec.entropy_mode)
        if hasattr(chunk, "paths"):
            chunk.paths.positions = self._path_positions(round_)
        if hasattr(chunk, "merger"):
            chunk.merger.request = self._media(round_)
        # A text model takes rotary positions from the boundaries of the sequences; position_ids only have to be there.
        return model(
            round_.share.input_ids,
            position_ids=self._axial_positions(round_) if self.takes_axes else None,
            attention_mask=None,
            packed_seq_params=round_.params,
        )

    def _path_positions(self, round_: Round) -> Tensor | None:
        """Return the positions (T,) of the aligned row of a forest; None where they follow from the boundaries."""
        if round_.packed.ends is None:
            return None
        positions = round_.packed.position_ids[0]
        return F.pad(positions, (0, sum(round_.share.lengths) - len(positions)))

    def _axial_positions(self, round_: Round) -> Tensor:
        """Return the positions (3, 1, T) of the whole aligned row."""
        lengths = round_.share.lengths
        place = places_of(round_.packed.lengths, lengths).to(self.layout.device)
        return axial_positions(round_.packed.position_ids.squeeze(-2), place, sum(lengths))

    def _media(self, round_: Round) -> MediaRequest:
        """Return the images and videos of the rows for the stage that embeds them."""
        packed = round_.packed
        sampled = packed.sampled.unsqueeze(0)
        media = Media(sampled)
        if round_.micro_batch is not None:
            order = packed.row_order if packed.media_order is None else packed.media_order
            inputs, shown = passes.media_of(round_.micro_batch.rows, order, self.layout.device)
            media = Media(sampled, inputs, shown)
        return MediaRequest(media, packed.input_ids, round_.share.places, round_.params)

    def outputs(self, found: Tensor, round_: Round, spec: passes.PassSpec) -> "ModelOutput":
        """Return (b, R) outputs on the device, zero outside the response mask, whole on every rank of the stage."""
        share = round_.share
        rows = found.squeeze(0)[: len(share.labels)]
        if self.is_value_model:
            values = {"values": rows[:, 0].float()}
        elif self.fuses_head:
            values = passes.named_scores(rows.unbind(-1))
        else:
            scores = vocab_parallel_log_probs_and_entropy(
                rows,
                share.labels,
                spec.temperature,
                entropy=spec.entropy_mode,
                vocab_size=self.vocab_size,
                group=self.layout.tp_group,
            )
            values = passes.named_scores(scores)
        group = self.layout.cp_group if self.layout.cp_size > 1 else None
        return passes.whole_outputs(values, share.target, share.shape, group, share.readers)
