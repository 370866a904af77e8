"""Tokens that a policy loss treats differently, chosen by their covariance over a whole mini-batch.

Tokens of high covariance of log-probability and advantage lower the entropy of the policy most, so two losses treat
them differently: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617),
section 4. A worker calls the selector before the update and passes each micro-batch its part of the selection, so the
choice depends neither on micro-batches nor on ranks.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from verl.algos.token_loss import ActorLossConfig, LossInputs, clip_range
from verl.utils.numerics.seeding import GOLDEN, MIX_FACTOR, mix


class Whole:
    """Reductions over a mini-batch that one process holds; a subclass reaches the shards of the other ranks."""

    def sum(self, values: Tensor) -> Tensor:
        """Add (n,) values over the shards."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Concatenate the (n,) values of the shards; all shards have the same n."""
        return values


TokenSelector = Callable[[LossInputs, Tensor, Whole], Tensor]
"""Choose tokens (B, T) over a whole mini-batch, of which the inputs hold the rows of this rank.

The second argument is a random number for each token (B, T) that does not depend on the rank that holds the token.
"""


def need(config: ActorLossConfig | None, name: str) -> ActorLossConfig:
    """Return the config.

    Raises: ValueError if it is None.
    """
    if config is None:
        raise ValueError(f"policy loss {name!r} reads its parameters from the actor's config: pass config")
    return config


def token_keys(seeds: Tensor, width: int, draw: int = 0) -> Tensor:
    """Return a random number of 63 bits for each token, (B, width) int64.

    The number depends only on the seed of the row, (B,) int64, on the number of the draw and on the token's position in
    the response.
    """
    columns = np.arange(1, width + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        rows = mix(seeds.cpu().numpy().astype(np.uint64) + np.uint64(draw + 1) * MIX_FACTOR)
        keys = mix(rows[:, None] + columns * GOLDEN) & np.uint64((1 << 63) - 1)
    return torch.from_numpy(keys.astype(np.int64)).to(seeds.device)


def token_covariances(log_prob: Tensor, advantages: Tensor, response_mask: Tensor, across: Whole) -> tuple[Tensor, int]:
    """Return ``(A - mean(A)) * (log_prob - mean(log_prob))`` of each token, and the number of tokens.

    The means are those of all tokens inside the mask. They are rounded to the precision of the tensors, so that the
    order of the additions does not change them.

    Source: arXiv:2505.22617, equation 9.
    """
    keep = response_mask.bool()
    log_prob = torch.where(keep, log_prob.detach(), 0.0)
    advantages = torch.where(keep, advantages, 0.0)
    sums = across.sum(torch.stack([keep.sum().double(), advantages.double().sum(), log_prob.double().sum()]))
    count = sums[0].clamp(min=1)
    mean_advantage, mean_log_prob = ((sums[at] / count).to(log_prob.dtype) for at in (1, 2))
    return (advantages - mean_advantage) * (log_prob - mean_log_prob), int(sums[0].item())


def _covariance(inputs: LossInputs, across: Whole) -> tuple[Tensor, int]:
    return token_covariances(inputs.log_prob, inputs.advantages, inputs.response_mask, across)


def _threshold(values: Tensor, candidates: Tensor, count: int, across: Whole) -> Tensor:
    """Return the ``count``-th smallest candidate over all shards; the dtype's maximum if there are fewer candidates."""
    info = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
    pool = values[candidates]
    own = pool.topk(min(count, pool.numel()), largest=False).values
    filled = torch.cat([own, own.new_full((count - own.numel(),), info.max)])  # equally many on each rank
    return across.gather(filled).topk(count, largest=False).values.max()


def _first(keys: Tensor, candidates: Tensor, count: int, across: Whole) -> Tensor:
    """Choose the ``count`` candidates with the smallest keys; copies of a row are chosen together or not at all."""
    return candidates & (keys <= _threshold(keys, candidates, count, across))


def select_clip_cov(inputs: LossInputs, keys: Tensor, across: Whole) -> Tensor:
    """Choose at random among the tokens whose covariance lies between the bounds and whose ratio is not clipped.

    Returns: (B, T) bool. ``keys`` are the random numbers, so the choice depends on neither shards nor order.
    """
    config = need(inputs.config, "clip_cov")
    low, high = clip_range(config)
    options = config.policy_loss
    share = 2e-4 if options.clip_cov_ratio is None else options.clip_cov_ratio
    lower = 1.0 if options.clip_cov_lb is None else options.clip_cov_lb
    upper = 5.0 if options.clip_cov_ub is None else options.clip_cov_ub
    covariance, tokens = _covariance(inputs, across)
    ratio = inputs.ratio.detach()
    # An advantage of zero may fall on either side: its token has no gradient.
    clipped = torch.where(inputs.advantages > 0, ratio > 1 + high, ratio < 1 - low)
    candidates = inputs.response_mask.bool() & (covariance > lower) & (covariance < upper) & ~clipped
    return _first(keys, candidates, max(1, int(share * tokens)), across)


def select_kl_cov(inputs: LossInputs, keys: Tensor, across: Whole) -> Tensor:
    """Choose the tokens of highest covariance; break ties at the threshold by the smallest keys.

    Returns: (B, T) bool.
    """
    options = need(inputs.config, "kl_cov").policy_loss
    share = 2e-4 if options.kl_cov_ratio is None else options.kl_cov_ratio
    covariance, tokens = _covariance(inputs, across)
    count = max(1, int(share * tokens))
    keep = inputs.response_mask.bool()
    threshold = _threshold(-covariance, keep, count, across)
    above = keep & (-covariance < threshold)
    tied = keep & (-covariance == threshold)
    rest = count - int(across.sum(above.sum().unsqueeze(0)).item())
    return above | _first(keys, tied, rest, across)
