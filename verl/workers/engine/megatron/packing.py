"""Pack rows for Megatron-Core: sequences of aligned length, of which each rank holds its part."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.models.mcore.packing import aligned_lengths, held_places, places_of
from verl.workers.engine.micro_batch import PackedRows


@dataclass(frozen=True)
class PackedShare:
    """One rank's part of packed rows.

    ``input_ids`` (1, t); ``lengths`` are those of the whole sequences with their padding. ``keep`` (k,) are places in
    the (t,) tokens of this rank, before sequence parallelism cuts them, with their ``labels`` and ``target`` (k,). A
    rank without counted tokens keeps one place without label and target: heads and collectives need a position.
    """

    input_ids: Tensor
    lengths: list[int]
    keep: Tensor
    labels: Tensor
    target: Tensor
    shape: tuple[int, int]


def share_of(packed: PackedRows, cp_size: int, cp_rank: int, tp_multiple: int) -> PackedShare:
    """Align the sequences, pad the whole if needed, and take this rank's part.

    Context parallelism gives each rank two chunks of every sequence, one from its front and one from its back. Causal
    attention costs more towards the end of a sequence, so contiguous parts would leave the first ranks idle.
    """
    lengths = aligned_lengths(packed.lengths, cp_size, tp_multiple)
    keep = packed.keep
    ids = packed.input_ids[0]
    labels = packed.labels
    target = packed.target
    if lengths != packed.lengths or cp_size > 1:
        device = ids.device
        place = places_of(packed.lengths, lengths)
        whole = ids.new_zeros(sum(lengths)).index_copy(0, place.to(device), ids)
        held = held_places(lengths, cp_size, cp_rank)
        local = torch.full((sum(lengths),), -1).index_copy(0, held, torch.arange(len(held)))
        here = local[place].to(device)[keep]  # of each kept position, -1 where another rank holds it
        mine = here >= 0
        ids = whole[held.to(device)]
        keep = here[mine]
        labels = labels[mine]
        target = target[mine]
    if not len(keep):
        keep = keep.new_zeros(1)
    return PackedShare(ids.unsqueeze(0), lengths, keep, labels, target, packed.shape)
