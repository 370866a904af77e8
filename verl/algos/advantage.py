"""Advantage estimators: from rewards of tokens to advantages and returns of tokens.

Every estimator takes keywords from one set (``token_level_rewards``, ``response_mask``, ``index``, ``values``,
``reward_baselines``, ``config``) and leaves out those that it does not need, so that a caller passes what the batch
has. Results are (B, T) and zero outside the response mask, whatever the inputs hold there.
"""

from collections.abc import Callable, Sequence
from enum import Enum, StrEnum
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from verl.utils.groupwise import as_torch_index, group_count, group_mean_std, group_sum
from verl.utils.torch_functional import masked_whiten

Index = np.ndarray[Any, Any] | Sequence[Any] | Tensor
AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
_Fn = TypeVar("_Fn", bound=AdvantageFn)


class AdvantageConfig(Protocol):
    """What estimators read of ``algorithm``."""

    @property
    def gamma(self) -> float: ...
    @property
    def lam(self) -> float: ...
    @property
    def norm_adv_by_std_in_grpo(self) -> bool: ...


class AdvantageEstimator(StrEnum):
    """The estimators that come with the library."""

    GAE = "gae"
    GRPO = "grpo"
    REINFORCE_PLUS_PLUS = "reinforce_plus_plus"
    REINFORCE_PLUS_PLUS_BASELINE = "reinforce_plus_plus_baseline"
    REMAX = "remax"
    RLOO = "rloo"
    OPO = "opo"
    GRPO_PASSK = "grpo_passk"
    GPG = "gpg"
    RLOO_VECTORIZED = "rloo_vectorized"
    GRPO_VECTORIZED = "grpo_vectorized"


ADV_ESTIMATOR_REGISTRY: dict[str, AdvantageFn] = {}


def _plain_name(name_or_enum: str | AdvantageEstimator) -> str:
    return name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[_Fn], _Fn]:
    """Enter the decorated estimator under a name for ``algorithm.adv_estimator``.

    Raises: ValueError when another function has the name.
    """
    name = _plain_name(name_or_enum)

    def enter(fn: _Fn) -> _Fn:
        known = ADV_ESTIMATOR_REGISTRY.setdefault(name, fn)
        if known is not fn:
            raise ValueError(f"advantage estimator {name!r} is already registered as {known!r}, not {fn!r}")
        return fn

    return enter


def get_adv_estimator_fn(name_or_enum: str | AdvantageEstimator) -> AdvantageFn:
    """Return a registered estimator.

    Raises: ValueError for an unknown name.
    """
    name = _plain_name(name_or_enum)
    if name not in ADV_ESTIMATOR_REGISTRY:
        raise ValueError(f"algorithm.adv_estimator must be one of {sorted(ADV_ESTIMATOR_REGISTRY)}, got {name!r}")
    return ADV_ESTIMATOR_REGISTRY[name]


def _inside(x: Tensor, mask: Tensor) -> Tensor:
    """Return x with zeros outside the mask, NaN there included."""
    return torch.where(mask.bool(), x, 0.0)


def _scores(rewards: Tensor, mask: Tensor) -> Tensor:
    """Add up the rewards of each response: (B,).

    A score may stand on a token that the model did not sample (the last one of a tool's answer), so only NaN is
    dropped outside the mask.
    """
    if rewards.shape != mask.shape:
        raise ValueError(
            f"token_level_rewards {tuple(rewards.shape)} and response_mask {tuple(mask.shape)} must both be (B, T)"
        )
    return torch.where(mask.bool() | ~rewards.isnan(), rewards, 0.0).sum(dim=-1)


def _groups(index: Index | None, scores: Tensor) -> Tensor:
    """Number the prompts of (B,) scores.

    Raises: ValueError when the index is absent or of another length.
    """
    if index is None:
        raise ValueError("this advantage estimator compares the samples of a prompt: pass index, the uid of each row")
    group = as_torch_index(index, device=scores.device)
    if len(group) != len(scores):
        raise ValueError(f"index has {len(group)} rows, token_level_rewards has {len(scores)}")
    return group


def _spread(per_response: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Give every token of a response the advantage of the response; the same tensor serves as returns."""
    advantages = _inside(per_response.unsqueeze(-1).expand(mask.shape), mask)
    return advantages, advantages


def _group_means(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return, for each row, the mean of its group (a group of one: 0) and the group's size."""
    mean, _, count = group_mean_std(scores, group)
    return mean[group], count[group]


def _backward_recursion(decay: Tensor, x: Tensor) -> Tensor:
    """Solve ``y[t] = x[t] + decay[t] * y[t + 1]`` for (B, T) from the end, one fused operation a token."""
    steps, factors = x.t().contiguous(), decay.t().contiguous()
    y = torch.zeros_like(steps)
    following = torch.zeros_like(x[:, 0])
    for t in reversed(range(len(steps))):
        following = torch.addcmul(steps[t], factors[t], following, out=y[t])
    return y.t()


@register_adv_est(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float | None = None,
    lam: float | None = None,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Estimate whitened advantages by exponentially weighted TD errors, and the returns that the critic learns.

    Tokens outside the mask (tool answers, padding) are stepped over: the value and the advantage after them are
    those of the next sampled token. Steps are counted from one sampled token to the next.

    Source: Schulman et al. (arXiv:1506.02438), equation 16.

    Args: rewards, values and mask are (B, T); gamma and lam default to the config's, else to 1.
    Raises: ValueError when the mask holds fewer than two tokens.
    """
    gamma = gamma if gamma is not None else config.gamma if config is not None else 1.0
    lam = lam if lam is not None else config.lam if config is not None else 1.0
    with torch.no_grad():
        keep = response_mask.bool()
        rewards, values = _inside(token_level_rewards, keep), _inside(values, keep)
        # The value after t: that of the next sampled token, found by carrying it back over what is masked out.
        carried = _backward_recursion((~keep).to(values.dtype), values)
        following = torch.cat([carried[:, 1:], torch.zeros_like(carried[:, :1])], dim=-1)
        delta = torch.where(keep, rewards + gamma * following - values, 0.0)
        decay = torch.ones_like(values).masked_fill(keep, gamma * lam)
        raw = _inside(_backward_recursion(decay, delta), keep)
        returns = raw + values
        advantages = _inside(masked_whiten(raw, response_mask), keep)
    return advantages, returns


@register_adv_est(AdvantageEstimator.GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Score each response against the other samples of its prompt.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1; without the deviation, Dr. GRPO (arXiv:2503.20783).

    Args: rewards and mask are (B, T); index holds the (B,) prompt uid. Normalisation is off when the argument or
        the config says so.
    Returns: (advantages, returns), one (B, T) tensor for both, zero where the mask is.
    Raises: ValueError when the inputs disagree on B.
    """
    return _grpo(token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config, floor=0.0)


@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
def compute_grpo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Like ``grpo``, with the variance of a group floored at ``epsilon`` before its root."""
    return _grpo(token_level_rewards, response_mask, index, epsilon, norm_adv_by_std_in_grpo, config, floor=epsilon)


def _grpo(
    rewards: Tensor,
    mask: Tensor,
    index: Index | None,
    epsilon: float,
    normalise: bool,
    config: AdvantageConfig | None,
    floor: float,
) -> tuple[Tensor, Tensor]:
    """Centre the scores of each group and divide them by its deviation where asked for."""
    with torch.no_grad():
        scores = _scores(rewards, mask)
        group = _groups(index, scores)
        mean, std, _ = group_mean_std(scores, group, eps=floor)
        centered = scores - mean[group]
        if _normalises(normalise, config):
            centered = centered / (std[group] + epsilon)
    return _spread(centered, mask)


def _normalises(argument: bool, config: AdvantageConfig | None) -> bool:
    return argument and (config is None or bool(config.norm_adv_by_std_in_grpo))


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Credit only the best sample of a prompt, by how far it is ahead of the second best.

    Source: Pass@k policy optimisation (arXiv:2503.19595).

    Raises: ValueError when a prompt has a single sample.
    """
    with torch.no_grad():
        scores = _scores(token_level_rewards, response_mask)
        group = _groups(index, scores)
        size = group_count(group)
        if bool((size < 2).any()):
            raise ValueError(
                "algorithm.adv_estimator=grpo_passk needs at least 2 samples of each prompt: "
                "set actor_rollout_ref.rollout.n to 2 or more"
            )
        by_score = torch.argsort(scores, descending=True, stable=True)
        order = by_score[torch.argsort(group[by_score], stable=True)]  # groups in turn, best first
        first = torch.cumsum(size, 0) - size
        best, second = order[first], order[first + 1]
        lead = scores[best] - scores[second]
        if _normalises(norm_adv_by_std_in_grpo, config):
            lead = lead / (group_mean_std(scores, group, eps=0.0)[1] + epsilon)
        advantages = torch.zeros_like(scores).index_copy_(0, best, lead)
    return _spread(advantages, response_mask)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, config: AdvantageConfig | None = None, **unused: object
) -> tuple[Tensor, Tensor]:
    """Whiten the discounted return of each token over the batch.

    The return starts anew behind every token outside the mask.

    Source: REINFORCE++ (arXiv:2501.03262), section 3.

    Raises: ValueError when the mask holds fewer than two tokens.
    """
    with torch.no_grad():
        keep = response_mask.bool()
        rewards = _inside(token_level_rewards, keep)
        gamma = config.gamma if config is not None else 1.0
        next_keep = torch.cat([keep[:, 1:], torch.zeros_like(keep[:, :1])], dim=-1)
        returns = _backward_recursion(gamma * next_keep.to(rewards.dtype), rewards)
        returns = _inside(returns, keep)
        advantages = _inside(masked_whiten(returns, response_mask), keep)
    return advantages, returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Subtract the mean of the prompt's samples and whiten over the tokens of the batch.

    ``epsilon`` has no effect: whitening has its own.

    Source: REINFORCE++ (arXiv:2501.03262), the variant with a baseline.

    Raises: ValueError when the mask holds fewer than two tokens.
    """
    with torch.no_grad():
        scores = _scores(token_level_rewards, response_mask)
        mean, _ = _group_means(scores, _groups(index, scores))
        tiled, _ = _spread(scores - mean, response_mask)
        advantages = _inside(masked_whiten(tiled, response_mask), response_mask)
    return advantages, advantages


@register_adv_est(AdvantageEstimator.RLOO)
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Score each response against the mean of the prompt's other samples; a group of one keeps its score.

    Source: Back to Basics (arXiv:2402.14740), section 3.3.
    """
    with torch.no_grad():
        scores = _scores(token_level_rewards, response_mask)
        mean, count = _group_means(scores, _groups(index, scores))
        advantages = (scores - mean) * torch.where(count > 1, count / (count - 1).clamp(min=1), 1.0)
    return _spread(advantages, response_mask)


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
def compute_rloo_vectorized_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Like ``rloo``, but a group of one has no advantage."""
    with torch.no_grad():
        scores = _scores(token_level_rewards, response_mask)
        mean, count = _group_means(scores, _groups(index, scores))
        advantages = torch.where(count > 1, (scores - mean) * count / (count - 1).clamp(min=1), 0.0)
    return _spread(advantages, response_mask)


@register_adv_est(AdvantageEstimator.OPO)
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Subtract the length-weighted mean of the prompt's samples, the baseline of least variance.

    Source: On-policy RL with optimal reward baseline (arXiv:2505.23585), section 3.
    """
    with torch.no_grad():
        scores = _scores(token_level_rewards, response_mask)
        group = _groups(index, scores)
        size = group_count(group)
        length = response_mask.sum(dim=-1).double()
        weighted = group_sum(length * scores, group, len(size)) / group_sum(length, group, len(size)).clamp(min=1)
        baseline = weighted.masked_fill(size <= 1, 0.0).to(scores.dtype)
        advantages = scores - baseline[group]
    return _spread(advantages, response_mask)


@register_adv_est(AdvantageEstimator.REMAX)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor,
    reward_baselines: Tensor,
    response_mask: Tensor,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Subtract the score of the greedy response from the reward to come of each token.

    Source: ReMax (arXiv:2310.10505), section 4.

    Args: rewards and mask are (B, T), baselines (B,).
    """
    with torch.no_grad():
        returns = _inside(token_level_rewards, response_mask).flip(-1).cumsum(-1).flip(-1)
        advantages = _inside(returns - reward_baselines.unsqueeze(-1), response_mask)
    return advantages, _inside(returns, response_mask)


@register_adv_est(AdvantageEstimator.GPG)
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    config: AdvantageConfig | None = None,
    **unused: object,
) -> tuple[Tensor, Tensor]:
    """Centre the scores of each prompt, scaled up by the share of responses that scored at all.

    Source: GPG (arXiv:2504.02546), section 3.

    Args: alpha multiplies ``B / max(1, number of non-zero scores)``; f_norm divides.
    """
    with torch.no_grad():
        scores = _scores(token_level_rewards, response_mask)
        mean, _ = _group_means(scores, _groups(index, scores))
        scale = alpha * len(scores) / scores.count_nonzero().clamp(min=1)
        advantages = scale * (scores - mean) / f_norm
    return _spread(advantages, response_mask)


__all__ = [
    "ADV_ESTIMATOR_REGISTRY",
    "AdvantageConfig",
    "AdvantageEstimator",
    "AdvantageFn",
    "compute_gae_advantage_return",
    "compute_gpg_outcome_advantage",
    "compute_grpo_outcome_advantage",
    "compute_grpo_passk_outcome_advantage",
    "compute_grpo_vectorized_outcome_advantage",
    "compute_opo_outcome_advantage",
    "compute_reinforce_plus_plus_baseline_outcome_advantage",
    "compute_reinforce_plus_plus_outcome_advantage",
    "compute_remax_outcome_advantage",
    "compute_rloo_outcome_advantage",
    "compute_rloo_vectorized_outcome_advantage",
    "get_adv_estimator_fn",
    "register_adv_est",
]
