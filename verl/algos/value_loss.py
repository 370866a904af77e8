"""The critic's loss and the entropy of a policy."""

import torch
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.utils.torch_functional import clip_by_value, entropy_from_logits, masked_mean


def compute_value_loss(
    vpreds: Tensor,
    returns: Tensor,
    values: Tensor,
    response_mask: Tensor,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
) -> tuple[Tensor, Tensor]:
    """Penalise the distance to the returns, with the step away from the old values clipped.

    Plain form: ``0.5 * maximum((v - r) ** 2, (v.clamp(values - c, values + c) - r) ** 2)`` at each token.

    Source: Schulman et al. (arXiv:1506.02438) with the clipping of the PPO reference implementation.

    Args: all tensors are (B, T).
    Returns: (loss, share of tokens whose clipped error is the larger).
    """
    keep = response_mask.bool()
    vpreds, returns, values = (torch.where(keep, x, 0.0) for x in (vpreds, returns, values))
    clipped = clip_by_value(vpreds, values - cliprange_value, values + cliprange_value)
    plain_error = (vpreds - returns).square()
    clipped_error = (clipped - returns).square()
    loss = 0.5 * plain_error.maximum(clipped_error)
    acted = (clipped_error > plain_error).to(vpreds.dtype)
    return agg_loss(loss, response_mask, loss_agg_mode), masked_mean(acted, response_mask)


def compute_entropy_loss(logits: Tensor, response_mask: Tensor, loss_agg_mode: str = "token-mean") -> Tensor:
    """Aggregate the entropy of (B, T, V) logits over a (B, T) mask."""
    return agg_loss(entropy_from_logits(logits), response_mask, loss_agg_mode)
