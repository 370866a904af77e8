"""Policy losses that treat the tokens of highest covariance differently, to keep the entropy of the policy up.

Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617), section 4.

Which tokens those are is decided over a whole mini-batch: a worker calls the selector before the update, and hands the
loss its part of the ``selection`` (B, T). Called without one, a loss selects over the tensors given.
"""

import torch
from torch import Tensor

from verl.algos.policy_loss_registry import (
    PolicyLossConfig,
    PolicyLossOutput,
    Whole,
    clip_range,
    need,
    register_policy_loss,
)
from verl.algos.token_loss import MAX_LOG_RATIO, Rows, TokenTerms, token_loss

_MASK_34, _MASK_37, _MASK_33 = (1 << 34) - 1, (1 << 37) - 1, (1 << 33) - 1
_GOLDEN, _FACTOR_1, _FACTOR_2 = (
    value - (1 << 64) for value in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)


def _mix(value: Tensor) -> Tensor:
    """Scramble int64 values so that close inputs give unrelated outputs.

    Source: Steele, Lea and Flood, "Fast splittable pseudorandom number generators" (OOPSLA 2014), variant 13.
    """
    value = (value ^ ((value >> 30) & _MASK_34)) * _FACTOR_1  # the masks make the shifts of signed numbers logical
    value = (value ^ ((value >> 27) & _MASK_37)) * _FACTOR_2
    return value ^ ((value >> 31) & _MASK_33)


def token_keys(seeds: Tensor, width: int, draw: int = 0) -> Tensor:
    """Return a random number of 63 bits for each token, (B, width) int64.

    It is a function of the seed of the row, (B,) int64, of the number of the draw and of the token's place in the
    response, and of nothing else.
    """
    columns = torch.arange(1, width + 1, dtype=torch.int64, device=seeds.device)
    rows = _mix(seeds.to(torch.int64) + torch.tensor(draw + 1, device=seeds.device) * _FACTOR_1)
    return _mix(rows.unsqueeze(1) + columns * _GOLDEN) & ((1 << 63) - 1)


def _covariance(log_prob: Tensor, advantages: Tensor, mask: Tensor, across: Whole) -> tuple[Tensor, int]:
    """Return the contribution of each token to the covariance of log-probability and advantage, in fp32 where the
    tensors are, and the number of tokens.

    The means are rounded to the tensors' precision: adding up in another order does not change them.
    """
    keep = mask.bool()
    log_prob, advantages = (torch.where(keep, values, 0.0) for values in (log_prob.detach(), advantages))
    sums = across.sum(torch.stack([keep.sum().double(), advantages.double().sum(), log_prob.double().sum()]))
    count = sums[0].clamp(min=1)
    mean_advantage, mean_log_prob = ((sums[at] / count).to(log_prob.dtype) for at in (1, 2))
    return (advantages - mean_advantage) * (log_prob - mean_log_prob), int(sums[0].item())


def _threshold(values: Tensor, candidates: Tensor, count: int, across: Whole) -> Tensor:
    """Return the ``count``-th smallest value of the candidates of all shards, infinity if they are fewer."""
    info = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
    smallest = torch.full((count,), info.max, dtype=values.dtype, device=values.device)
    pool = values[candidates]
    own = pool.topk(min(count, pool.numel()), largest=False).values
    smallest[: own.numel()] = own
    return across.gather(smallest).topk(count, largest=False).values.max()


def _first(keys: Tensor, candidates: Tensor, count: int, across: Whole) -> Tensor:
    """Choose the ``count`` candidates with the smallest keys; rows that are copies of each other share their fate."""
    return candidates & (keys <= _threshold(keys, candidates, count, across))


def select_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyLossConfig,
    keys: Tensor,
    across: Whole,
) -> Tensor:
    """Choose at random among the tokens whose covariance lies between the bounds and that the ratio does not clip.

    Returns: (B, T) bool. Random are the ``keys``, so that the choice depends neither on the shards nor on the order.
    """
    low, high = clip_range(config, "clip_cov")
    options = config.policy_loss
    share = 2e-4 if options.clip_cov_ratio is None else options.clip_cov_ratio
    lower = 1.0 if options.clip_cov_lb is None else options.clip_cov_lb
    upper = 5.0 if options.clip_cov_ub is None else options.clip_cov_ub
    keep = response_mask.bool()
    covariance, tokens = _covariance(log_prob, advantages, response_mask, across)
    ratio = (log_prob.detach() - old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    clipped = torch.where(advantages > 0, ratio > 1 + high, ratio < 1 - low)  # no matter where the advantage is zero
    candidates = keep & (covariance > lower) & (covariance < upper) & ~clipped
    return _first(keys, candidates, max(1, int(share * tokens)), across)


def select_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    config: PolicyLossConfig,
    keys: Tensor,
    across: Whole,
) -> Tensor:
    """Choose the tokens of highest covariance; among equal ones at the threshold, those with the smallest keys.

    Returns: (B, T) bool.
    """
    share = config.policy_loss.kl_cov_ratio
    covariance, tokens = _covariance(log_prob, advantages, response_mask, across)
    count = max(1, int((2e-4 if share is None else share) * tokens))
    keep = response_mask.bool()
    threshold = _threshold(-covariance, keep, count, across)
    above, tied = keep & (-covariance < threshold), keep & (-covariance == threshold)
    rest = count - int(across.sum(above.sum().unsqueeze(0)).item())
    return above | _first(keys, tied, rest, across)


def _own_keys(mask: Tensor) -> Tensor:
    """Return keys from torch's generator, for a loss that selects over the tensors it is given."""
    draw = int(torch.randint(1 << 31, ()).item())
    return token_keys(torch.arange(mask.shape[0], device=mask.device), mask.shape[1], draw)


@register_policy_loss("clip_cov", selector=select_clip_cov)
def compute_policy_loss_clip_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    selection: Tensor | None = None,
) -> PolicyLossOutput:
    """Clip the ratio of each token, and take a few tokens of high covariance out of the loss.

    Source: arXiv:2505.22617, section 4.3 (Clip-Cov).
    """
    config = need(config, "clip_cov")
    low, high = clip_range(config, "clip_cov")
    if selection is None:
        selection = select_clip_cov(
            old_log_prob, log_prob, advantages, response_mask, config, _own_keys(response_mask), Whole()
        )

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, selected: Tensor) -> TokenTerms:
        log_ratio = rows.inside(log_prob - old_log_prob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages, ratio = rows.inside(advantages) * ~selected, log_ratio.exp()
        plain, clipped = advantages * ratio, advantages * ratio.clamp(1 - low, 1 + high)
        loss = -plain.minimum(clipped)
        chosen = rows.inside(selected.to(loss)).sum()
        return TokenTerms(loss, lambda: torch.where(plain <= clipped, loss, 0.0), -log_ratio.sum(), chosen)

    tensors = (old_log_prob, advantages, selection)
    return token_loss(terms, log_prob, tensors, response_mask, loss_agg_mode, rollout_is_weights)


@register_policy_loss("kl_cov", selector=select_kl_cov)
def compute_policy_loss_kl_cov(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: PolicyLossConfig | None = None,
    rollout_is_weights: Tensor | None = None,
    selection: Tensor | None = None,
) -> PolicyLossOutput:
    """Leave the ratio unclipped, and hold a few tokens of the highest covariance back by |log_ratio|.

    Source: arXiv:2505.22617, section 4.3 (KL-Cov).

    Returns: as every loss; ``ppo_kl`` is the mean of |log_ratio|.
    """
    config = need(config, "kl_cov")
    if selection is None:
        selection = select_kl_cov(
            old_log_prob, log_prob, advantages, response_mask, config, _own_keys(response_mask), Whole()
        )
    coefficient = 1.0 if config.policy_loss.ppo_kl_coef is None else config.policy_loss.ppo_kl_coef

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, selected: Tensor) -> TokenTerms:
        difference = rows.inside(log_prob - old_log_prob)
        log_ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        plain = -rows.inside(advantages) * log_ratio.exp()
        distance = difference.abs()

        def slope() -> Tensor:
            steady = torch.where(log_ratio == difference, plain, 0.0)
            return steady + torch.where(selected, coefficient * difference.sign(), 0.0)

        return TokenTerms(plain + torch.where(selected, coefficient * distance, 0.0), slope, distance.sum())

    tensors = (old_log_prob, advantages, selection)
    return token_loss(terms, log_prob, tensors, response_mask, loss_agg_mode, rollout_is_weights)
