"""How per-token numbers become one number, the same for every split of a mini-batch.

A loss over a micro-batch is a *sum* together with the *unit* by which the whole mini-batch divides it. An engine adds
the sums of all micro-batches of all data-parallel ranks and divides once, by the count of that unit in the global
mini-batch: so neither the micro-batch size nor the number of ranks changes a loss, a gradient or a metric.
"""

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Unit = Literal["token", "sequence", "constant"]
UNITS: tuple[str, ...] = get_args(Unit)

LOSS_AGG_UNIT: dict[str, Unit] = {
    "token-mean": "token",
    "seq-mean-token-sum": "sequence",
    "seq-mean-token-mean": "sequence",
    "seq-mean-token-sum-norm": "constant",
}


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


def count_units(mask: Tensor) -> Tensor:
    """Count what a (B, T) mask holds of each unit, in the order of ``UNITS``: a float64 tensor (3,)."""
    counts = torch.tensor([0.0, mask.shape[0], 1.0], dtype=torch.float64, device=mask.device)
    counts[0] = mask.sum()
    return counts


def agg_unit(loss_agg_mode: str) -> Unit:
    """Return the unit by which a mode normalises.

    Raises: ValueError for an unknown mode.
    """
    if loss_agg_mode not in LOSS_AGG_UNIT:
        raise ValueError(f"loss_agg_mode must be one of {sorted(LOSS_AGG_UNIT)}, got {loss_agg_mode!r}")
    return LOSS_AGG_UNIT[loss_agg_mode]


def row_weights(lengths: Tensor, loss_agg_mode: str, length: int) -> Tensor:
    """Return by what the sum of each row counts, (B,) from the numbers of its tokens.

    ``length`` is the constant of ``seq-mean-token-sum-norm``.

    Raises: ValueError for an unknown mode.
    """
    agg_unit(loss_agg_mode)
    if loss_agg_mode == "seq-mean-token-mean":
        return 1.0 / lengths.double().clamp(min=1)
    weight = 1.0 / length if loss_agg_mode == "seq-mean-token-sum-norm" else 1.0
    return torch.full_like(lengths, weight, dtype=torch.float64)


def agg_count(lengths: Tensor, loss_agg_mode: str) -> Tensor:
    """Return by what the sum over the rows is divided, in float64: the tokens, the rows, or one."""
    total = lengths.sum(dtype=torch.float64)
    counts = {"token": total, "sequence": torch.full_like(total, len(lengths)), "constant": torch.ones_like(total)}
    return counts[agg_unit(loss_agg_mode)].clamp(min=1)


def agg_sum(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, length: int | None = None) -> Sum:
    """Sum a (B, T) matrix so that dividing by the count of the unit gives the aggregated loss.

    ``length`` is the constant of ``seq-mean-token-sum-norm``; it defaults to the width of the mask.
    """
    masked = torch.where(loss_mask.bool(), loss_mat, 0.0)
    if loss_mask.is_floating_point():  # a mask may weigh
        masked = masked * loss_mask
    weights = row_weights(loss_mask.sum(-1), loss_agg_mode, length or loss_mask.shape[-1])
    return Sum((masked.sum(-1) * weights.to(masked.dtype)).sum(), agg_unit(loss_agg_mode))


def agg_loss(loss_mat: Tensor, loss_mask: Tensor, loss_agg_mode: str, length: int | None = None) -> Tensor:
    """Aggregate a (B, T) matrix into the loss of a batch that is not split any further.

    Raises: ValueError for an unknown mode.
    Source: Dr. GRPO (arXiv:2503.20783) section 3.2 for the constant norm, DAPO (arXiv:2503.14476) section 3.3 for the
    token mean.
    """
    part = agg_sum(loss_mat, loss_mask, loss_agg_mode, length)
    return part.total / agg_count(loss_mask.sum(-1), loss_agg_mode).to(part.total.dtype)
