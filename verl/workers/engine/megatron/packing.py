"""Packed rows as Megatron-Core takes them: sequences of aligned length, of which each rank holds its part."""

from dataclasses import dataclass

import torch
from torch import Tensor

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
    """Align the sequences, add one of padding where the whole needs it, and take this rank's part.

    Context parallelism cuts a sequence into ``2 * cp_size`` chunks and gives each rank one from either end. Sequence
    parallelism cuts what a rank holds into ``tp_multiple`` equal parts.
    """
    chunks = 2 * cp_size if cp_size > 1 else 1
    lengths = [-(-length // chunks) * chunks for length in packed.lengths]
    unit = cp_size * tp_multiple if cp_size > 1 else tp_multiple
    missing = -sum(lengths) % unit
    while missing % chunks:
        missing += unit
    shares_all = lengths == packed.lengths and not missing
    if missing:
        lengths = [*lengths, missing]
    keep, ids = packed.keep, packed.input_ids[0]
    labels, target = packed.labels, packed.target
    if not shares_all or cp_size > 1:
        device = ids.device
        real = torch.tensor([*packed.lengths, 0][: len(lengths)])
        place = torch.cat([torch.arange(n) + at for n, at in zip(real.tolist(), _starts(lengths), strict=True)])
        whole = ids.new_zeros(sum(lengths)).index_copy(0, place.to(device), ids)
        held = _held(lengths, cp_size, cp_rank)
        local = torch.full((sum(lengths),), -1).index_copy(0, held, torch.arange(len(held)))
        here = local[place].to(device)[keep]  # of each kept position, -1 where another rank holds it
        mine = here >= 0
        ids, keep, labels, target = whole[held.to(device)], here[mine], labels[mine], target[mine]
    if not len(keep):  # heads and collectives want at least one position
        keep = keep.new_zeros(1)
    return PackedShare(ids.unsqueeze(0), lengths, keep, labels, target, packed.shape)


def _starts(lengths: list[int]) -> list[int]:
    starts, at = [], 0
    for length in lengths:
        starts.append(at)
        at += length
    return starts


def _held(lengths: list[int], cp_size: int, cp_rank: int) -> Tensor:
    """Return the places in the aligned row that a rank holds, in its order."""
    if cp_size == 1:
        return torch.arange(sum(lengths))
    held = []
    for start, length in zip(_starts(lengths), lengths, strict=True):
        step = length // (2 * cp_size)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            held.append(torch.arange(step) + start + chunk * step)
    return torch.cat(held)
