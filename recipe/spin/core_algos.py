"""Preferences within pairs of responses, and the losses of a pair.

Source: SPIN (arXiv:2401.01335), with pairs of the policy's own responses as in online DPO (arXiv:2402.04792).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


def compute_onlineDPO_pref(token_level_rewards: Tensor, response_mask: Tensor) -> Tensor:
    """Return a mask (B,) of the better response of each pair; in a tie the first one counts as better.

    Rows 2i and 2i + 1 are a pair.

    Raises: ValueError if the number of rows is odd.
    """
    if len(token_level_rewards) % 2:
        raise ValueError(f"{len(token_level_rewards)} responses make no pairs: write an even rollout.n")
    scores = summed(token_level_rewards, response_mask).view(-1, 2)
    first = scores[:, 0] >= scores[:, 1]
    return torch.stack([first, ~first], dim=-1).flatten()


def of_whole_pairs(response_mask: Tensor) -> Tensor:
    """Clear the mask (B, R) of a response whose partner has no tokens, because it is missing or was not scored."""
    is_whole = response_mask.any(-1).view(-1, 2).all(-1).repeat_interleave(2)
    return response_mask * is_whole.unsqueeze(-1)


def summed(values: Tensor, mask: Tensor) -> Tensor:
    """Sum (B, R) values over the unmasked tokens of each row: (B,)."""
    return torch.where(mask.bool(), values, 0.0).sum(-1)


def compute_online_dpo_loss(
    logits: Tensor, beta: float, label_smoothing: float = 0.0, loss_type: str = "sigmoid"
) -> Tensor:
    """Return the loss of each pair, (P,).

    Args: ``logits`` (P,) are the differences of two log-ratios of policy and reference: chosen minus rejected response.
    """
    if loss_type == "ipo":
        return (logits - 1 / (2 * beta)) ** 2
    right = F.logsigmoid(beta * logits)
    return -(1 - label_smoothing) * right - label_smoothing * F.logsigmoid(-beta * logits)


@dataclass
class Pairs:
    """The outputs of a pair loss, for each response: tensors (B,), where both responses of a pair have the same loss.

    Attributes:
        loss: loss of the pair.
        gradient: derivative of the loss with respect to the log-probability of the response.
        logits: log-ratio of the chosen response minus log-ratio of the rejected response.
    """

    loss: Tensor
    gradient: Tensor
    logits: Tensor


def pairs_of(log_ratio: Tensor, is_chosen: Tensor, beta: float, label_smoothing: float, loss_type: str) -> Pairs:
    """Compute the losses of neighbouring responses from their log-ratios (B,) of policy and reference.

    The derivative with respect to each response is computed here, so that an engine may put the two responses of a pair
    into different micro-batches.
    """
    side = is_chosen.to(log_ratio.dtype) * 2 - 1
    logits = (side * log_ratio).view(-1, 2).sum(-1).detach().requires_grad_()
    with torch.enable_grad():
        loss = compute_online_dpo_loss(logits, beta, label_smoothing, loss_type)
        (slope,) = torch.autograd.grad(loss.sum(), logits)
    loss, slope, logits = (each.detach().repeat_interleave(2) for each in (loss, slope, logits))
    return Pairs(loss, side * slope, logits)
