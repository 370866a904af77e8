"""Positions of packed tokens under context and sequence parallelism.

Context parallelism cuts a sequence into ``2 * cp_size`` chunks and gives each rank one from either end: under a causal
mask the late chunk has more work than the early one, and the pair balances that. Sequence parallelism cuts the tokens
of a rank into ``tp_multiple`` equal parts. Both need aligned lengths.
"""

from itertools import accumulate

import torch
from torch import Tensor


def aligned_lengths(lengths: list[int], cp_size: int, tp_multiple: int) -> list[int]:
    """Pad lengths so that they can be cut; if the total needs more, append one sequence of padding."""
    chunks = 2 * cp_size if cp_size > 1 else 1
    aligned = [-(-length // chunks) * chunks for length in lengths]
    unit = cp_size * tp_multiple if cp_size > 1 else tp_multiple
    missing = -sum(aligned) % unit
    while missing % chunks:
        missing += unit
    return [*aligned, missing] if missing else aligned


def places_of(lengths: list[int], aligned: list[int]) -> Tensor:
    """Return the position (T,) of each token in the aligned row."""
    real = [*lengths, 0][: len(aligned)]
    return torch.cat([torch.arange(n) + at for n, at in zip(real, _starts(aligned), strict=True)])


def local_places(lengths: list[int], aligned: list[int], cp_size: int, cp_rank: int) -> Tensor:
    """Return each token's position (T,) among the tokens of a rank, -1 if another rank holds it."""
    held = held_places(aligned, cp_size, cp_rank)
    local = torch.full((sum(aligned),), -1).index_copy(0, held, torch.arange(len(held)))
    return local[places_of(lengths, aligned)]


def held_places(aligned: list[int], cp_size: int, cp_rank: int) -> Tensor:
    """Return the positions of the aligned row that a rank holds, in the rank's order."""
    if cp_size == 1:
        return torch.arange(sum(aligned))
    held = []
    for start, length in zip(_starts(aligned), aligned, strict=True):
        step = length // (2 * cp_size)
        for chunk in (cp_rank, 2 * cp_size - 1 - cp_rank):
            held.append(torch.arange(step) + start + chunk * step)
    return torch.cat(held)


def _starts(lengths: list[int]) -> list[int]:
    return list(accumulate(lengths, initial=0))[:-1]
