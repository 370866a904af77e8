"""A loss of every token, with its slope in the log-probability, summed up a few rows at a time.

Rows do not know each other: what is computed of a block stays in the cache, and nothing of the size of the batch
is allocated but, where there is a gradient, the one tensor that the backward pass needs.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from verl.algos.aggregate import agg_count, row_weights

BLOCK_ELEMENTS = {"cpu": 1 << 17}
BLOCK_ELEMENTS_DEFAULT = 1 << 25
"""Tokens that are worked on at once: what a cache holds, what fills an accelerator."""

MAX_LOG_RATIO = 20.0


@dataclass
class TokenTerms:
    """What a loss makes of a block of tokens (b, T); all of it is zero, or False, outside the mask.

    ``loss``, and ``slope()``, its derivative in the log-probability; ``kl``, a scalar sum; where a loss has them, which
    tokens were clipped, and which by the lower bound.
    """

    loss: Tensor
    slope: Callable[[], Tensor]
    kl: Tensor | None = None
    clipped: Tensor | None = None
    clipped_low: Tensor | None = None


TokenFn = Callable[..., TokenTerms]
"""Takes a boolean mask and blocks of tensors, NaN outside the mask for all it knows."""


def inside(keep: Tensor, values: Tensor) -> Tensor:
    """Return the values with zeros outside the boolean mask."""
    return torch.where(keep, values, 0.0)


class _WithSlope(torch.autograd.Function):
    """A scalar, and its known derivative in a tensor."""

    @staticmethod
    def forward(ctx: Any, variable: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return grad * slope, None, None


def token_loss(
    fn: TokenFn,
    log_prob: Tensor,
    tensors: tuple[Tensor, ...],
    response_mask: Tensor,
    loss_agg_mode: str,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Aggregate a loss of tokens, each multiplied by its weight; returns what a policy loss does.

    ``fn`` is called with blocks of rows of the boolean mask, of ``log_prob`` and of the other tensors, all (B, T).
    """
    needs_slope = torch.is_grad_enabled() and log_prob.requires_grad
    with torch.no_grad():
        current = log_prob.detach()
        lengths = response_mask.sum(-1)
        count = agg_count(lengths, "token-mean").to(current.dtype)
        share = row_weights(lengths, loss_agg_mode, response_mask.shape[-1]) / agg_count(lengths, loss_agg_mode)
        share = share.to(current.dtype).unsqueeze(-1)  # (B, 1): of the sum of a row in the loss
        slope = torch.empty_like(current) if needs_slope else None
        sums = []
        for block in _blocks(current):
            keep = response_mask[block].bool()
            terms = fn(keep, current[block], *(tensor[block] for tensor in tensors))
            loss, scale = terms.loss, share[block]
            if weights is not None:
                scale = scale * inside(keep, weights[block])
            total = (loss * scale).sum() if weights is not None else torch.dot(loss.sum(-1), scale.squeeze(-1))
            sums.append(torch.stack([total, *_statistics(terms, total)]))
            if slope is not None:
                torch.mul(terms.slope(), scale, out=slope[block])
        total, kl, clipped, clipped_low = torch.stack(sums).sum(0).unbind()
    loss = total if slope is None else _WithSlope.apply(log_prob, total, slope)  # type: ignore[no-untyped-call]
    return loss, clipped / count, kl / count, clipped_low / count


def _blocks(tensor: Tensor) -> list[slice]:
    """Return the blocks of rows; one, of none, where there is no row."""
    elements = BLOCK_ELEMENTS.get(tensor.device.type, BLOCK_ELEMENTS_DEFAULT)
    rows = max(1, elements // max(1, tensor.shape[-1]))
    return [slice(at, at + rows) for at in range(0, max(1, tensor.shape[0]), rows)]


def _statistics(terms: TokenTerms, like: Tensor) -> list[Tensor]:
    """Return the sums of a block's statistics in the order of a policy loss, less the loss: kl, clips, lower clips."""
    zero = torch.zeros_like(like)
    counts = [zero if flags is None else flags.count_nonzero() for flags in (terms.clipped, terms.clipped_low)]
    return [(zero if value is None else value).to(like.dtype) for value in (terms.kl, *counts)]
