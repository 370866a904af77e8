"""The loss of SPPO, and an actor with this loss for a module that the caller provides."""

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
"""The batch key of the responses' rewards minus their baseline, (B,), which SPPO uses as advantages."""


def compute_sppo_loss(
    old_log_prob: Tensor, log_prob: Tensor, rewards: Tensor, response_mask: Tensor, eta: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Return the loss, averaged over responses, and the log-ratio of each response, (B,).

    Plain form: ``((log_ratio - eta * rewards) ** 2).mean()``, where a log-ratio is the sum over a whole response. Rows
    without tokens do not count as responses.

    Args: ``rewards`` (B,) are the rewards minus the expected reward of the policy that sampled the responses.
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
    """Compute the loss from advantages (B, R) that hold a response's reward at each of its tokens."""
    mask = response_mask.bool()
    rewards = torch.where(mask, advantages, 0.0).sum(-1) / mask.sum(-1).clamp(min=1)
    loss, _ = compute_sppo_loss(old_log_prob, log_prob, rewards, mask, config.sppo_eta)
    tokens = mask.sum().clamp(min=1)
    kl = torch.where(mask, old_log_prob - log_prob, 0.0).sum().detach() / tokens
    return loss, torch.zeros_like(kl), kl, torch.zeros_like(kl)


def at_each_token(values: Tensor, mask: Tensor) -> Tensor:
    """Spread (B,) values to all unmasked tokens of their rows: (B, R)."""
    return values.unsqueeze(-1) * mask.to(values.dtype)


class DataParallelSPPOActor(DataParallelPPOActor):
    """The actor of SPPO for a module that the caller provides; its configuration is a ``SPPOActorConfig``."""

    def update_policy(self, data: DataProto | Iterable[DataProto]) -> dict[str, list[float]]:
        """Take one optimizer step per mini-batch and epoch; ``seq_level_rewards`` (B,) may replace advantages."""
        if isinstance(data, DataProto) and SEQ_REWARDS in tensors_of(data).keys():
            batch = tensors_of(data)
            batch["advantages"] = at_each_token(batch[SEQ_REWARDS], batch["response_mask"])
        return super().update_policy(data)
