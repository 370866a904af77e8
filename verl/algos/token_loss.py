"""Inputs, result and reduction of a policy loss that is a formula over (B, T) tokens."""

import dataclasses
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from verl.algos.aggregate import Sum, agg_sum

MAX_LOG_RATIO = 20.0
"""Bound of the log-ratio of a token, so that no ratio overflows."""


class ClipOptions(Protocol):
    """The fields of ``actor_rollout_ref.actor`` that say how far a ratio may move."""

    @property
    def clip_ratio(self) -> float: ...
    @property
    def clip_ratio_low(self) -> float | None: ...
    @property
    def clip_ratio_high(self) -> float | None: ...
    @property
    def clip_ratio_c(self) -> float: ...


class PolicyLossOptions(Protocol):
    """The fields that the losses read of ``actor_rollout_ref.actor.policy_loss``."""

    clip_cov_ratio: float | None
    clip_cov_lb: float | None
    clip_cov_ub: float | None
    kl_cov_ratio: float | None
    ppo_kl_coef: float | None
    tau_pos: float
    tau_neg: float


class ActorLossConfig(ClipOptions, Protocol):
    """The fields that the losses read of ``actor_rollout_ref.actor``."""

    @property
    def policy_loss(self) -> PolicyLossOptions: ...


@dataclass(frozen=True)
class LossInputs:
    """The arguments of a policy loss; all tensors are (B, T).

    ``selection`` marks the tokens that a loss with a selector has chosen over the mini-batch.
    """

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str
    config: ActorLossConfig | None
    rollout_is_weights: Tensor | None = None
    selection: Tensor | None = None

    @property
    def log_ratio(self) -> Tensor:
        """Log-probability minus the old one."""
        return self.log_prob - self.old_log_prob

    @property
    def ratio(self) -> Tensor:
        """Probability over the old one, bounded."""
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def inside_mask(self) -> "LossInputs":
        """Return the inputs in fp32 or better, zero outside the mask.

        NaN in padding then reaches neither the loss nor, because ``where`` stops it, a gradient.
        """
        keep = self.response_mask.bool()
        dtype = torch.promote_types(self.log_prob.dtype, torch.float32)
        old, new, advantages = (
            torch.where(keep, values.to(dtype), 0.0) for values in (self.old_log_prob, self.log_prob, self.advantages)
        )
        weights = self.rollout_is_weights
        if weights is not None:
            weights = torch.where(keep, weights.to(dtype), 0.0)
        return dataclasses.replace(
            self, old_log_prob=old, log_prob=new, advantages=advantages, rollout_is_weights=weights
        )

    def mean_of_response(self, values: Tensor) -> Tensor:
        """Return the mean of (B, T) values over the tokens of each response, (B, 1); 0 without a token."""
        keep = self.response_mask.bool()
        return torch.where(keep, values, 0.0).sum(-1, keepdim=True) / keep.sum(-1, keepdim=True).clamp(min=1)


@dataclass(frozen=True)
class TokenLoss:
    """The loss of each token, (B, T), with values per token for the metrics.

    Attributes:
        loss: before weights and mask; numbers outside the mask do not count.
        is_clipped: tokens whose ratio was clipped, for ``pg_clipfrac``.
        is_bounded: tokens bounded by the dual clip, for ``pg_clipfrac_lower``.
        kl: estimate of the KL to the old policy; by default the old log-probability minus the new one, bounded.
        weights: factors of the loss in place of the rollout's importance weights, (B, T) or (B, 1).
    """

    loss: Tensor
    is_clipped: Tensor | None = None
    is_bounded: Tensor | None = None
    kl: Tensor | None = None
    weights: Tensor | None = None


@dataclass(frozen=True)
class PolicyLossSums:
    """A policy loss over a micro-batch before any division.

    ``loss`` names the unit that divides it. The other three are sums over tokens: of the clipped tokens, of the
    estimate of the KL, of the tokens clipped by the lower bound.
    """

    loss: Sum
    clipped: Tensor
    kl: Tensor
    clipped_low: Tensor


def reduce_tokens(found: TokenLoss, inputs: LossInputs) -> PolicyLossSums:
    """Weight the losses of tokens inside the mask, sum them by ``loss_agg_mode``, and count for the metrics."""
    keep = inputs.response_mask.bool()
    weights = inputs.rollout_is_weights if found.weights is None else found.weights
    loss = found.loss if weights is None else found.loss * weights
    kl = -inputs.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO) if found.kl is None else found.kl
    clipped, kl_sum, bounded = (
        loss.new_zeros(()) if values is None else torch.where(keep, values.detach(), 0).sum(dtype=loss.dtype)
        for values in (found.is_clipped, kl, found.is_bounded)
    )
    return PolicyLossSums(agg_sum(loss, inputs.response_mask, inputs.loss_agg_mode), clipped, kl_sum, bounded)


def clip_range(config: ClipOptions) -> tuple[float, float]:
    """Return how far the ratio may fall below 1 and rise above 1 before it is clipped."""
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high
