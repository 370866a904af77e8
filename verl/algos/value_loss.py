"""The critic's loss and the entropy of a policy."""

import torch
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.utils.torch_functional import clip_by_value, entropy_from_logits, masked_mean


def value_loss_terms(
    vpreds: Tensor, returns: Tensor, values: Tensor, response_mask: Tensor, cliprange_value: float
) -> tuple[Tensor, Tensor]:
    """Return half the clipped squared error of each token, and 1 where the clipped error is the larger, both (B, T).

    Plain form: ``0.5 * maximum((v - r) ** 2, (v.clamp(values - c, values + c) - r) ** 2)``.
    """
    keep = response_mask.bool()
    vpreds, returns, values = (torch.where(keep, x, 0.0) for x in (vpreds, returns, values))
    clipped = clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    plain_error = (vpreds - returns).square()
    clipped_error = (clipped - returns).square()
    return 0.5 * plain_error.maximum(clipped_error), (clipped_error > plain_error).to(vpreds.dtype)


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """Penalise the distance to the returns, with the step away from the old values clipped.

    Source: Schulman et al. (arXiv:1506.02438) with the clipping of the PPO reference implementation.

    Args: all tensors are (B, T).
    Returns: (loss, share of tokens whose clipped error is the larger).
    """
    loss, clipped = value_loss_terms(vpreds, returns, values, response_mask, cliprange_value)
    return agg_loss(loss, response_mask, loss_agg_mode), masked_mean(clipped, response_mask)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregate the entropy of (B, T, V) logits over a (B, T) mask."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)


__all__ = [
    "compute_entropy_loss",
    "compute_value_loss",
    "value_loss_terms",
]
