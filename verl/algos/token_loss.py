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


_INTEGERS = {4: torch.int32, 8: torch.int64}


class Rows:
    """Which tokens of a block of rows count, and how many of each: ``counts`` (b,)."""

    def __init__(self, mask: Tensor, dtype: torch.dtype) -> None:
        self.counts = mask.sum(-1)
        self.dtype = dtype
        self._bits = mask.bool().to(_INTEGERS[dtype.itemsize]).neg_()  # all bits of the tokens that count

    def inside(self, values: Tensor) -> Tensor:
        """Return the values (b, T) with zeros at the tokens that do not count, whatever stood there, in ``dtype``.

        The bits of a number are cleared or not: unlike ``torch.where`` this is no branch, and a few times faster.
        """
        return (values.to(self.dtype).view(self._bits.dtype) & self._bits).view(self.dtype)


@dataclass
class TokenTerms:
    """What a loss makes of a block of tokens (b, T), zero where they do not count.

    ``loss``, and ``slope()``, its derivative in the log-probability; three sums: of the estimate of the KL, of the
    tokens that were clipped, and of those by the lower bound.
    """

    loss: Tensor
    slope: Callable[[], Tensor]
    kl: Tensor | float = 0.0
    clipped: Tensor | float = 0.0
    clipped_low: Tensor | float = 0.0


TokenFn = Callable[..., TokenTerms]
"""Takes ``Rows``, and blocks of tensors (b, T) in which anything may stand where no token counts."""


class _WithSlope(torch.autograd.Function):
    """A scalar, and its known derivative in a tensor: ``slope / divisor``."""

    @staticmethod
    def forward(ctx: Any, variable: Tensor, value: Tensor, slope: Tensor, divisor: Tensor) -> Tensor:
        ctx.save_for_backward(slope, divisor)
        ctx.dtype = variable.dtype
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        slope, divisor = ctx.saved_tensors
        return (slope * (grad / divisor)).to(ctx.dtype), None, None, None


def token_loss(
    fn: TokenFn,
    log_prob: Tensor,
    tensors: tuple[Tensor, ...],
    response_mask: Tensor,
    loss_agg_mode: str,
    weights: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Aggregate a loss of tokens, each multiplied by its weight; returns what a policy loss does.

    ``fn`` is called with blocks of rows of ``log_prob``, in fp32 or better, and of the other tensors, all (B, T).
    """
    current, width = log_prob.detach(), response_mask.shape[-1]
    current = current.to(torch.promote_types(current.dtype, torch.float32))
    slope = torch.empty_like(current) if torch.is_grad_enabled() and log_prob.requires_grad else None
    sums, counts = [], []
    with torch.no_grad():
        for block in _blocks(current):
            rows = Rows(response_mask[block], current.dtype)
            terms = fn(rows, current[block], *(tensor[block] for tensor in tensors))
            counts.append(rows.counts)
            scale = row_weights(rows.counts, loss_agg_mode, width).to(current.dtype).unsqueeze(-1)
            if weights is not None:
                scale = scale * rows.inside(weights[block])
                total = (terms.loss * scale).sum()
            else:
                total = torch.dot(terms.loss.sum(-1), scale.squeeze(-1))
            statistics = (terms.kl, terms.clipped, terms.clipped_low)
            sums.append(torch.stack([total, *(torch.as_tensor(value).to(total) for value in statistics)]))
            if slope is not None:
                torch.mul(terms.slope(), scale, out=slope[block])
        counted = torch.cat(counts)
        divisor = agg_count(counted, loss_agg_mode).to(current.dtype)
        loss, kl, clipped, clipped_low = torch.stack(sums).sum(0).unbind()
        loss, tokens = loss / divisor, agg_count(counted, "token-mean").to(current.dtype)
    if slope is not None:
        loss = _WithSlope.apply(log_prob, loss, slope, divisor)  # type: ignore[no-untyped-call]
    return loss, clipped / tokens, kl / tokens, clipped_low / tokens


def _blocks(tensor: Tensor) -> list[slice]:
    """Return the blocks of rows; one, of none, where there is no row."""
    elements = BLOCK_ELEMENTS.get(tensor.device.type, BLOCK_ELEMENTS_DEFAULT)
    rows = max(1, elements // max(1, tensor.shape[-1]))
    return [slice(at, at + rows) for at in range(0, max(1, tensor.shape[0]), rows)]
