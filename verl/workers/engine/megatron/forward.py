"""One micro-batch through this rank's chunk of the model, and from the head of the last stage to the outputs."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.models.mcore.gpt.layers import HeadRequest, PackedRowParams, packed_row_params
from verl.utils.megatron.tensor_parallel import vocab_parallel_log_probs_and_entropy
from verl.workers.engine.megatron.layout import Layout
from verl.workers.engine.megatron.packing import PackedShare, share_of
from verl.workers.engine.micro_batch import (
    MicroBatch,
    named_scores,
    pack_rows,
    response_mask_of,
    tensors_of,
    whole_outputs,
)
from verl.workers.engine.pass_spec import PassSpec

if TYPE_CHECKING:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.module import MegatronModule

    from verl.protocol import DataProto
    from verl.workers.engine.base import ModelOutput


@dataclass(frozen=True)
class Round:
    """One micro-batch of a pipeline schedule, on the device; None if this rank only takes part."""

    at: int
    micro_batch: MicroBatch | None
    share: PackedShare
    params: PackedRowParams


def check_positions(data: "DataProto") -> None:
    """Check that positions count the tokens of a row from 0, as Megatron-Core counts packed tokens.

    Raises: ValueError naming the first row whose positions do not.
    """
    batch = tensors_of(data)
    positions = batch["position_ids"]
    attention = batch["attention_mask"]
    if positions.dim() == 3:
        raise ValueError("position_ids of three dims (multi-modal rope) are not supported with strategy=megatron")
    wrong = ((positions != attention.cumsum(-1) - 1) & attention.bool()).any(-1)
    if wrong.any():
        raise ValueError(
            f"position_ids of row {int(wrong.nonzero()[0])} do not count its tokens from 0, which strategy=megatron "
            "needs: write attention_mask.cumsum(-1) - 1"
        )


@dataclass(frozen=True)
class Forward:
    """Pack micro-batches and run them so that logits exist only where a counted token is read.

    With ``fuses_head`` the head scores tokens without making logits (``verl.models.mcore.gpt.layers.FusedHead``).
    """

    layout: Layout
    is_value_model: bool
    vocab_size: int
    sequence_parallel: bool
    lead: int
    fuses_head: bool

    def prepare(self, at: int, micro_batch: MicroBatch | None) -> Round:
        """Pack a micro-batch; a missing one becomes a single token that does not count."""
        device = self.layout.device
        if micro_batch is None:
            zeros = torch.zeros(1, 1, dtype=torch.long, device=device)
            packed = pack_rows(zeros, torch.ones_like(zeros), zeros, zeros)
        else:
            micro_batch = micro_batch.to(device)
            batch = tensors_of(micro_batch.rows)
            counted = response_mask_of(micro_batch.rows)
            packed = pack_rows(batch["input_ids"], batch["attention_mask"], batch["position_ids"], counted, self.lead)
        tp_multiple = self.layout.tp_size if self.sequence_parallel else 1
        share = share_of(packed, self.layout.cp_size, self.layout.cp_rank, tp_multiple)
        return Round(at, micro_batch, share, packed_row_params(share.lengths, device))

    def run(self, model: "MegatronModule", chunk: "GPTModel", round_: Round, spec: PassSpec) -> Tensor:
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
        # Rotary positions come from the boundaries of the sequences; position_ids only have to be there.
        return model(round_.share.input_ids, position_ids=None, attention_mask=None, packed_seq_params=round_.params)

    def outputs(self, found: Tensor, round_: Round, spec: PassSpec) -> "ModelOutput":
        """Return (b, R) outputs on the device, zero outside the response mask, whole on every rank of the stage."""
        share = round_.share
        rows = found.squeeze(0)[: len(share.labels)]
        if self.is_value_model:
            values = {"values": rows[:, 0].float()}
        elif self.fuses_head:
            values = named_scores(rows.unbind(-1))
        else:
            scores = vocab_parallel_log_probs_and_entropy(
                rows,
                share.labels,
                spec.temperature,
                entropy=spec.entropy_mode,
                vocab_size=self.vocab_size,
                group=self.layout.tp_group,
            )
            values = named_scores(scores)
        group = self.layout.cp_group if self.layout.cp_size > 1 else None
        return whole_outputs(values, share.target, share.shape, group)
