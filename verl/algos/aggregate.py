"""Aggregation of per-token numbers into one number, the same for every split of a mini-batch.

A loss over a micro-batch is a *sum* and the *unit* by which the whole mini-batch divides it. An engine adds the sums of
all micro-batches of all data-parallel ranks and divides once, by the count of that unit in the global mini-batch. So
neither the micro-batch size nor the number of ranks changes a loss, a gradient or a metric.

A trajectory may be several rows. ``SHARE_COLUMN`` then says for each row which share of the sampled tokens of its
trajectory it holds. The rows of a trajectory count as one sequence: each row counts as its share, and the mean over
tokens is taken over the tokens of all rows. So a trajectory gives the same loss in several rows as in one.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from verl.algos.names import BY_LENGTH, LOSS_AGG_MODES, LOSS_AGG_UNIT, Unit

UNITS: tuple[str, ...] = tuple(unit for unit in get_args(Unit) if unit != "micro_batch")
"""The units that the rows of a mini-batch have, in whatever micro-batches."""
SHARE_COLUMN = "trajectory_share"
"""The tensor (B,) of a batch with the shares of its rows; without it every row is a whole sequence."""


@dataclass(frozen=True)
class Sum:
    """A scalar sum over a micro-batch, and the unit whose count in the global mini-batch divides it."""

    total: Tensor
    unit: Unit


@dataclass(frozen=True)
class Extreme:
    """A scalar metric whose micro-batches combine by maximum or minimum."""

    value: Tensor
    kind: Literal["max", "min"]


Metric = Sum | Extreme


def count_units(mask: Tensor, shares: Tensor | None = None) -> Tensor:
    """Count the units of a (B, T) mask in the order of ``UNITS``: a float64 tensor (3,).

    A row without a token only fills the batch, and does not count as a sequence. ``shares`` (B,) say which share of its
    trajectory's tokens each row holds.
    """
    lengths = mask.sum(-1)
    counts = torch.ones(len(UNITS), dtype=torch.float64, device=mask.device)
    counts[0] = mask.sum()
    counts[1] = _num_sequences(lengths, shares)
    return counts


def unit_count(lengths: Tensor, unit: Unit, shares: Tensor | None = None) -> Tensor:
    """Count the given unit in rows of (B,) lengths, at least 1, as a 0-dim float64 tensor.

    A mean is a sum divided by this count. A row without a token does not count as a sequence.
    """
    if unit == "token":
        return lengths.sum(dtype=torch.float64).clamp(min=1)
    if unit == "sequence":
        count = _num_sequences(lengths, shares)
        return torch.where(count > 0, count, 1.0)
    return torch.ones((), dtype=torch.float64, device=lengths.device)


def _num_sequences(lengths: Tensor, shares: Tensor | None) -> Tensor:
    with_tokens = lengths > 0
    return (with_tokens if shares is None else with_tokens * shares).sum(dtype=torch.float64)


def sum_of_mean(mean: Tensor, mask: Tensor, unit: Unit) -> Sum:
    """Return the sum over a (B, T) mask whose mean over a unit is given, for losses that can only return means."""
    return Sum(mean * unit_count(mask.sum(-1), unit).to(mean.dtype), unit)


def by_length(loss: Sum, loss_agg_mode: str, width: int, length: int | None) -> Sum:
    """Rescale a loss divided by the width (T) of its batch to the configured length, if its mode divides by length."""
    if loss_agg_mode != BY_LENGTH or length is None:
        return loss
    return Sum(loss.total * (width / length), loss.unit)


def agg_unit(loss_agg_mode: str) -> Unit:
    """Return the unit by which a mode normalises.

    Raises: ValueError for an unknown mode.
    """
    if loss_agg_mode not in LOSS_AGG_UNIT:
        raise ValueError(  # callers match the first words
            f"Invalid loss_agg_mode: {loss_agg_mode}: "
            f"loss_agg_mode must be one of {sorted(LOSS_AGG_MODES)}, got {loss_agg_mode!r}"
        )
    return LOSS_AGG_UNIT[loss_agg_mode]


def row_weights(lengths: Tensor, loss_agg_mode: str, length: int, shares: Tensor | None = None) -> Tensor:
    """Return the weight of the sum of each row, (B,) float64, from the number of its tokens.

    ``length`` is the constant of ``seq-mean-token-sum-norm``. A row with a share of its trajectory's tokens has
    ``lengths / shares`` of them in all.

    Raises: ValueError for an unknown mode.
    """
    agg_unit(loss_agg_mode)
    if loss_agg_mode == "seq-mean-token-mean":
        return (1.0 if shares is None else shares.double()) / lengths.double().clamp(min=1)
    weight = 1.0 / length if loss_agg_mode == BY_LENGTH else 1.0
    return torch.full_like(lengths, weight, dtype=torch.float64)


def agg_sum(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    length: int | None = None,
    shares: Tensor | None = None,
) -> Sum:
    """Sum a (B, T) matrix so that dividing by the count of the unit gives the aggregated loss.

    Plain form: ``((loss_mat * loss_mask).sum(-1) * row_weights(...)).sum()``.

    ``length`` is the constant of ``seq-mean-token-sum-norm``; it defaults to the width of the mask. ``shares`` (B,) say
    which share of its trajectory's tokens each row holds.
    """
    masked = torch.where(loss_mask.bool(), loss_mat, 0.0)
    if loss_mask.is_floating_point():  # a mask may hold weights
        masked = masked * loss_mask
    weights = row_weights(loss_mask.sum(-1), loss_agg_mode, length or loss_mask.shape[-1], shares)
    return Sum((masked.sum(-1) * weights.to(masked.dtype)).sum(), agg_unit(loss_agg_mode))


def agg_loss(
    loss_mat: Tensor,
    loss_mask: Tensor,
    loss_agg_mode: str,
    length: int | None = None,
    shares: Tensor | None = None,
) -> Tensor:
    """Aggregate a (B, T) matrix into the loss of a batch that is not split further.

    Raises: ValueError for an unknown mode.
    Source: Dr. GRPO (arXiv:2503.20783) section 3.2 for the constant length, DAPO (arXiv:2503.14476) section 3.3 for the
    token mean.
    """
    part = agg_sum(loss_mat, loss_mask, loss_agg_mode, length, shares)
    return part.total / unit_count(loss_mask.sum(-1), part.unit, shares).to(part.total.dtype)


def rows_by_share(shares: Tensor | None, loss_agg_mode: str) -> list[tuple[float, Tensor]] | None:
    """Group rows by their share, as pairs (share, (n,) rows), for losses that can only return a mean over their rows.

    The sum of such a loss over some rows, times their share, is their part of the loss. None if all rows count alike:
    the mode takes no mean over the tokens of a sequence, or every row is a whole sequence.
    """
    if shares is None or loss_agg_mode != "seq-mean-token-mean" or bool((shares == 1).all()):
        return None
    return [(share, (shares == share).nonzero().squeeze(-1)) for share in sorted(set(shares.tolist()))]
