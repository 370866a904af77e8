"""Packed rows as Megatron-Core takes them: sequences of aligned length, of which each rank holds its part."""

from dataclasses import dataclass

import torch
from torch import Tensor

from verl.utils.megatron.packing import aligned_lengths, held_places, places_of
from verl.workers.engine.micro_batch import PackedRows


@dataclass(frozen=True)
class PackedShare:
    """What one rank holds of packed rows.

    ``input_ids`` (1, t); ``lengths`` are those of the whole sequences with their padding. ``keep`` (k,) are places in
    the (t,) tokens of this rank, before sequence parallelism cuts them, and ``labels`` and ``target`` (k,) belong to
    them; where this rank has nothing asked of it, ``keep`` is one place that has neither.
    """

    input_ids: Tensor
    lengths: list[int]
    keep: Tensor
    labels: Tensor
    target: Tensor
    shape: tuple[int, int]


def share_of(packed: PackedRows, cp_size: int, cp_rank: int, tp_multiple: int) -> PackedShare:
    """Align the sequences, add one of padding where the whole needs it, and take this rank's part."""
    lengths = aligned_lengths(packed.lengths, cp_size, tp_multiple)
    shares_all = lengths == packed.lengths
    keep, ids = packed.keep, packed.input_ids[0]
    labels, target = packed.labels, packed.target
    if not shares_all or cp_size > 1:
        device = ids.device
        place = places_of(packed.lengths, lengths)
        whole = ids.new_zeros(sum(lengths)).index_copy(0, place.to(device), ids)
        held = held_places(lengths, cp_size, cp_rank)
        local = torch.full((sum(lengths),), -1).index_copy(0, held, torch.arange(len(held)))
        here = local[place].to(device)[keep]  # of each kept position, -1 where another rank holds it
        mine = here >= 0
        ids, keep, labels, target = whole[held.to(device)], here[mine], labels[mine], target[mine]
    if not len(keep):  # heads and collectives want at least one position
        keep = keep.new_zeros(1)
    return PackedShare(ids.unsqueeze(0), lengths, keep, labels, target, packed.shape)
