"""The loss of SPPO, and an actor around a module of the caller that uses it."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from verl.algos.policy_loss import PolicyLossOutput, register_policy_loss
from verl.protocol import DataProto, tensors_of
from verl.workers.actor import DataParallelPPOActor

if TYPE_CHECKING:
    from .config import SPPOActorConfig

SEQ_REWARDS = "seq_level_rewards"
"""The batch key of what takes the place of an advantage, (B,)."""


def compute_sppo_loss(
    old_log_prob: Tensor, log_prob: Tensor, rewards: Tensor, response_mask: Tensor, eta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the loss, mean over responses, and the log-ratio of each response, (B,).

    Plain form: ``((log_ratio - eta * rewards) ** 2).mean()`` with the log-probabilities of whole responses. A row
    without a token is no response.

    Args: ``rewards`` are the (B,) rewards, minus the value of the policy they were sampled from.
    Source: SPPO (arXiv:2405.00675), equation 4.4.
    """
    mask = response_mask.bool()
    ratio = torch.where(mask, log_prob - old_log_prob, 0.0).sum(-1)
    squares = torch.where(mask.any(-1), (ratio - eta * rewards) ** 2, 0.0)
    return squares.sum() / mask.any(-1).sum().clamp(min=1), ratio


@register_policy_loss("sppo", loss_agg_mode="seq-mean-token-sum")
def sppo_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str,
    config: "SPPOActorConfig",
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Compute the loss by advantages (B, R) that are the reward of the response at each of its tokens."""
    mask = response_mask.bool()
    rewards = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    loss, _ = compute_sppo_loss(old_log_prob, log_prob, rewards, mask, config.sppo_eta)
    tokens = mask.sum().clamp(min=1)
    kl = torch.where(mask, old_log_prob - log_prob, 0.0).sum().detach() / tokens
    return loss, torch.zeros_like(kl), kl, torch.zeros_like(kl)


def at_each_token(values: Tensor, mask: Tensor) -> Tensor:
    """Return (B,) values as (B, R), at each token."""
    return values.unsqueeze(-1) * mask.to(values.dtype)


class DataParallelSPPOActor(DataParallelPPOActor):
    """An actor around a module of the caller, whose configuration is a ``SPPOActorConfig``."""

    def update_policy(self, data: DataProto | Iterable[DataProto]) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; a batch may hold ``seq_level_rewards`` (B,) alone."""
        if isinstance(data, DataProto) and SEQ_REWARDS in tensors_of(data).keys():
            batch = tensors_of(data)
            batch["advantages"] = at_each_token(batch[SEQ_REWARDS], batch["response_mask"])
        return super().update_policy(data)
