"""Policy losses, each over the (B, T) tokens of the sampled responses.

A registered loss has the signature of ``PolicyLossFn`` and returns ``(pg_loss, pg_clipfrac, ppo_kl,
pg_clipfrac_lower)``: the loss aggregated by ``effective_loss_agg_mode``, the rest as means over tokens. What the inputs
hold outside the mask, NaN included, reaches neither the loss nor a gradient.
"""

import torch
from torch import Tensor

from verl.algos.policy_loss_cov import compute_policy_loss_clip_cov, compute_policy_loss_kl_cov
from verl.algos.policy_loss_registry import (
    POLICY_LOSS_REGISTRY,
    PolicyLossConfig,
    PolicyLossFn,
    PolicyLossOutput,
    clip_range,
    effective_loss_agg_mode,
    get_policy_loss_fn,
    get_token_selector,
    need,
    register_policy_loss,
)
from verl.algos.token_loss import MAX_LOG_RATIO, Rows, TokenTerms, token_loss

_MAX_SEQUENCE_LOG_RATIO = 10.0


class ClipRatioError(ValueError, AssertionError):
    """The constant of the dual clip is not above one."""


def clipped_terms(
    rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, low: float, high: float, dual: float
) -> TokenTerms:
    """Return the dual-clipped loss of each token, and whether the upper and the lower clip acted.

    Source: PPO (arXiv:1707.06347), equation 7; dual clip, arXiv:1912.09729, section 4.
    """
    advantages = rows.inside(advantages)
    log_ratio = rows.inside(log_prob - old_log_prob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    kl = -log_ratio.sum()
    ratio = log_ratio.exp_()
    plain = advantages * ratio
    gain = plain.minimum(ratio.clamp_(1 - low, 1 + high).mul_(advantages))
    acted = plain.sub_(gain).sign_()  # 1 where the clip has lowered the gain
    bound = advantages.clamp_(max=0).mul_(dual)  # zero, which no gain falls below, where no advantage is negative
    loss = bound.maximum(gain)
    acted_low = gain.sub_(loss).sign_().neg_()  # 1 where the bound has raised it
    loss.neg_()

    def slope() -> Tensor:
        return torch.addcmul(loss, loss, acted.maximum(acted_low), value=-1)  # the loss is -advantage x ratio, or fixed

    return TokenTerms(loss, slope, kl, clipped=acted.sum(), clipped_low=acted_low.sum())


@register_policy_loss("vanilla")
def compute_policy_loss_vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Clip the ratio of each token, and for negative advantages the loss as well.

    Raises: ValueError, also an AssertionError, when ``clip_ratio_c`` is not above 1.
    """
    low, high = clip_range(config, "vanilla")
    dual = need(config, "vanilla").clip_ratio_c
    return _vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, low, high, dual, rollout_is_weights
    )


def _vanilla(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    mask: Tensor,
    loss_agg_mode: str,
    low: float,
    high: float,
    dual: float,
    weights: Tensor | None = None,
) -> PolicyLossOutput:
    if not dual > 1.0:
        raise ClipRatioError(f"actor_rollout_ref.actor.clip_ratio_c must be above 1, got {dual}")

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        return clipped_terms(rows, log_prob, old_log_prob, advantages, low, high, dual)

    return token_loss(terms, log_prob, (old_log_prob, advantages), mask, loss_agg_mode, weights)


def compute_policy_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    cliprange: float | None = None,
    cliprange_low: float | None = None,
    cliprange_high: float | None = None,
    clip_ratio_c: float = 3.0,
    loss_agg_mode: str = "token-mean",
) -> PolicyLossOutput:
    """Compute ``vanilla`` from plain numbers; deprecated for ``get_policy_loss_fn("vanilla")``.

    Raises: ValueError when neither ``cliprange`` nor both of its parts are given.
    """
    low = cliprange if cliprange_low is None else cliprange_low
    high = cliprange if cliprange_high is None else cliprange_high
    if low is None or high is None:
        raise ValueError("compute_policy_loss needs cliprange, or both cliprange_low and cliprange_high")
    return _vanilla(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, low, high, clip_ratio_c)


@register_policy_loss("gspo", loss_agg_mode="seq-mean-token-mean")
def compute_policy_loss_gspo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Clip the length-normalised ratio of the whole response; its gradient is spread over the tokens.

    Source: GSPO (arXiv:2507.18071), section 4.3 (GSPO-token).
    """
    low, high = clip_range(config, "gspo")

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        log_ratio, advantages = rows.inside(log_prob - old_log_prob), rows.inside(advantages)
        mean = log_ratio.sum(-1, keepdim=True) / rows.counts.clamp(min=1).unsqueeze(-1)
        ratio = mean.clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()  # (b, 1), that of every token of the response
        bounded = ratio.clamp(1 - low, 1 + high)
        positive, negative = advantages.clamp(min=0), advantages.clamp_(max=0)
        low_ratio, high_ratio = ratio.minimum(bounded), ratio.maximum(bounded)
        too_high, too_low = ratio > low_ratio, ratio < high_ratio  # (b, 1): for a positive, for a negative advantage
        clipped = positive.sign().sum(-1, keepdim=True) * too_high - negative.sign().sum(-1, keepdim=True) * too_low

        def slope() -> Tensor:
            moves = ratio * (mean <= _MAX_SEQUENCE_LOG_RATIO)
            return (positive * (-moves * ~too_high)).addcmul_(negative, -moves * ~too_low)

        loss = (positive * -low_ratio).addcmul_(negative, -high_ratio)
        return TokenTerms(loss, slope, -log_ratio.sum(), clipped.sum())

    tensors = (old_log_prob, advantages)
    return token_loss(terms, log_prob, tensors, response_mask, "seq-mean-token-mean", rollout_is_weights)


@register_policy_loss("gpg")
def compute_policy_loss_gpg(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Take the plain policy gradient, without ratio or clip.

    Source: GPG (arXiv:2504.02546), section 3.
    """

    def terms(rows: Rows, log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        slope = rows.inside(advantages).neg_()
        return TokenTerms(rows.inside(log_prob) * slope, lambda: slope)

    return token_loss(terms, log_prob, (advantages,), response_mask, loss_agg_mode, rollout_is_weights)


@register_policy_loss("geo_mean", loss_agg_mode="seq-mean-token-mean")
def compute_policy_loss_geo_mean(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-mean",
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Weigh each response by the geometric mean of its token ratios, clipped token by token in the log domain.

    Source: GMPO (arXiv:2507.20673), section 3.
    """
    low, high = clip_range(config, "geo_mean")
    lengths, tokens = response_mask.sum(-1).clamp(min=1), response_mask.sum().clamp(min=1)
    keep, dtype = response_mask.bool(), torch.promote_types(log_prob.dtype, torch.float32)
    log_ratio, advantages = (
        torch.where(keep, x.to(dtype), 0.0) for x in (log_prob.to(dtype) - old_log_prob, advantages)
    )
    clamped = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    pessimistic = sign * (sign * log_ratio).minimum(sign * clamped)
    loss = -(advantages.sum(-1) / lengths) * (pessimistic.sum(-1) / lengths).clamp(max=MAX_LOG_RATIO).exp()
    if rollout_is_weights is not None:
        log_weights = torch.where(keep, (rollout_is_weights + 1e-10).log(), 0.0)
        loss = loss * (log_weights.sum(-1) / lengths).exp()
    acted = clamped != log_ratio
    return (
        loss.sum() / max(1, len(loss)),
        (acted & (advantages > 0)).sum(dtype=loss.dtype) / tokens,
        -log_ratio.detach().sum() / tokens,
        (acted & (advantages < 0)).sum(dtype=loss.dtype) / tokens,
    )


@register_policy_loss("cispo")
def compute_policy_loss_cispo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Weigh the policy gradient of each token by its clipped ratio, so that no token loses its gradient.

    Source: MiniMax-M1 (arXiv:2506.13585), section 3.1 (CISPO).
    """
    low, high = clip_range(config, "cispo")

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        log_ratio = rows.inside(log_prob - old_log_prob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        weight = ratio.clamp(1 - low, 1 + high)
        acted = weight != ratio
        slope = weight.mul_(rows.inside(advantages)).neg_()
        return TokenTerms(slope * rows.inside(log_prob), lambda: slope, -log_ratio.sum(), acted.count_nonzero())

    return token_loss(terms, log_prob, (old_log_prob, advantages), response_mask, loss_agg_mode, rollout_is_weights)


@register_policy_loss("sapo")
def compute_policy_loss_sapo(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
) -> PolicyLossOutput:
    """Let the gradient of a token fade as its ratio leaves 1, by a sigmoid with a temperature for each sign.

    Source: SAPO (arXiv:2511.20347), section 3; there aggregated by ``seq-mean-token-mean``.
    """
    options = need(config, "sapo").policy_loss

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        difference, advantages = rows.inside(log_prob - old_log_prob), rows.inside(advantages)
        ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
        tau = (advantages > 0).to(ratio).mul_(options.tau_pos - options.tau_neg).add_(options.tau_neg)
        gate = ((ratio - 1) * tau).sigmoid_()
        loss = (gate * advantages).mul_(-4).div_(tau)
        return TokenTerms(loss, lambda: gate * (1 - gate) * ratio * advantages * -4, -difference.sum())

    return token_loss(terms, log_prob, (old_log_prob, advantages), response_mask, loss_agg_mode, rollout_is_weights)


__all__ = [
    "POLICY_LOSS_REGISTRY",
    "ClipRatioError",
    "PolicyLossConfig",
    "PolicyLossFn",
    "PolicyLossOutput",
    "clipped_terms",
    "compute_policy_loss",
    "compute_policy_loss_cispo",
    "compute_policy_loss_clip_cov",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_kl_cov",
    "compute_policy_loss_sapo",
    "compute_policy_loss_vanilla",
    "effective_loss_agg_mode",
    "get_policy_loss_fn",
    "get_token_selector",
    "register_policy_loss",
]
