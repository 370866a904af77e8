"""Advantage estimators: from rewards of tokens to advantages and returns of tokens.

``estimate_advantages`` calls all of them in one way, with the keywords ``token_level_rewards``, ``response_mask`` and
``config``, and those of ``index``, ``values``, ``reward_baselines``, ``gamma``, ``lam`` and ``norm_adv_by_std_in_grpo``
that the batch has. An estimator takes the ones it needs, and reads ``config`` for options that it is not given. Results
are (B, T) and zero outside the response mask, whatever the inputs hold there. Tokens outside the mask take no time:
rewards to come flow over them, and discounts count the sampled tokens.

In the formulas, S is the score of a response (the sum of its rewards), mean and std are those of its group (equal
``index``), and m is the response mask.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from verl.algos.names import AdvantageEstimator as AdvantageEstimator
from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.utils.groupwise import as_torch_index, group_count, group_mean_std, group_sum
from verl.utils.numerics.scan import reverse_scan

Index = np.ndarray | Sequence[str | int] | Tensor
AdvantageFn = Callable[..., tuple[Tensor, Tensor]]
_WHITEN_EPSILON = 1e-8
_Fn = TypeVar("_Fn", bound=AdvantageFn)


class AdvantageConfig(Protocol):
    """The fields that estimators read of ``algorithm``."""

    gamma: float
    lam: float
    norm_adv_by_std_in_grpo: bool


Input = Index | float | AdvantageConfig | Mapping[str, float] | None
"""An input of an estimator: a column of the batch, or an option."""

ADV_ESTIMATOR_REGISTRY: dict[str, AdvantageFn] = {}


def _plain_name(name_or_enum: str | AdvantageEstimator) -> str:
    return name_or_enum.value if isinstance(name_or_enum, Enum) else name_or_enum


def register_adv_est(name_or_enum: str | AdvantageEstimator) -> Callable[[_Fn], _Fn]:
    """Register the decorated estimator under a name for ``algorithm.adv_estimator``.

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
        raise WrongInput(  # callers match the first words
            f"Unknown advantage estimator simply: {name}: "
            f"algorithm.adv_estimator must be one of {sorted(ADV_ESTIMATOR_REGISTRY)}, got {name!r}"
        )
    return ADV_ESTIMATOR_REGISTRY[name]


def estimate_advantages(name_or_enum: str | AdvantageEstimator, **inputs: Any) -> tuple[Tensor, Tensor]:
    """Call a registered estimator with the inputs that it has parameters for.

    A row whose mask is zero everywhere, such as that of a trajectory that failed, only fills the batch: the estimator
    does not see such a row, and the row's advantages and returns are zero. If only one of several samples of a prompt
    is left, an estimator that compares the samples of a prompt does not see this one either.

    Raises: ValueError for an unknown name, or when a required parameter is not among the inputs.
    """
    estimator = get_adv_estimator_fn(name_or_enum)
    parameters = inspect.signature(estimator).parameters.values()
    named = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in inputs]
    if missing:
        raise WrongInput(
            f"algorithm.adv_estimator={_plain_name(name_or_enum)} needs {', '.join(missing)}, "
            f"this batch has only {', '.join(inputs)}"
        )
    compares = "index" in inputs and any(p.name == "index" for p in named)
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        inputs = {p.name: inputs[p.name] for p in named if p.name in inputs}
    return _on_used_rows(estimator, inputs, compares)


def _on_used_rows(estimator: AdvantageFn, inputs: dict[str, Any], compares: bool) -> tuple[Tensor, Tensor]:
    """Call an estimator on the rows to use; advantages and returns of the other rows are zero."""
    mask = inputs.get("response_mask")
    if not isinstance(mask, Tensor) or bool(mask.any(dim=-1).all()):
        return estimator(**inputs)
    used = rows_to_use(mask, inputs["index"] if compares else None)
    if not used.any():
        return torch.zeros(mask.shape), torch.zeros(mask.shape)
    found = estimator(**{name: _select(value, used) for name, value in inputs.items()})
    advantages, returns = (part.new_zeros(mask.shape).masked_scatter(used.unsqueeze(-1), part) for part in found)
    return advantages, returns


def rows_to_use(mask: Tensor, index: Index | None) -> Tensor:
    """Return a mask (B,) of the rows to use: rows with a token.

    With the ``index`` of groups, a row is left out if it is the only one with a token in a group of several.
    """
    used = mask.any(dim=-1)
    if index is not None:
        group = as_torch_index(index, device=mask.device)
        size = group_count(group)
        left = group_sum(used, group, int(group.max()) + 1)
        used = used & ~((size > 1) & (left == 1))[group]
    return used


def _select(value: Any, rows: Tensor) -> Any:
    """Return the given rows (B,) of a tensor, array or list of B rows; other values are no columns."""
    if isinstance(value, Tensor):
        return value[rows] if value.dim() and len(value) == len(rows) else value
    if isinstance(value, np.ndarray):
        return value[rows.cpu().numpy()] if value.ndim and len(value) == len(rows) else value
    if isinstance(value, list) and len(value) == len(rows):
        return [each for each, keep in zip(value, rows.tolist(), strict=True) if keep]
    return value


def _option(
    given: float | None, config: AdvantageConfig | Mapping[str, float] | None, name: str, default: float
) -> float:
    """Return the caller's value, else the config's value, else the default."""
    if given is not None:
        return given
    value = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    return default if value is None else float(value)


def _scores(rewards: Tensor, mask: Tensor, index: Index | None) -> tuple[Tensor, Tensor]:
    """Return the score of each response (the sum of its token rewards) and the index of its prompt's group, both (B,).

    Scores are float64, so that equal scores within a group cancel exactly. Rewards outside the mask count too, since a
    caller may place a reward on a token that the model did not sample; only a NaN outside the mask is treated as 0.

    Raises: ValueError when the index is missing or the inputs disagree on their shapes.
    """
    if rewards.shape != mask.shape:
        raise ValueError(
            f"token_level_rewards {tuple(rewards.shape)} and response_mask {tuple(mask.shape)} must both be (B, T)"
        )
    scores = rewards.sum(dim=-1)
    if scores.isnan().any():
        scores = torch.where(mask.bool() | ~rewards.isnan(), rewards, 0.0).sum(dim=-1)
    if index is None:
        raise ValueError("this advantage estimator compares the samples of a prompt: pass index, the uid of each row")
    group = as_torch_index(index, device=scores.device)
    if len(group) != len(scores):
        raise ValueError(f"index has {len(group)} rows, token_level_rewards has {len(scores)}")
    return scores.double(), group


def _spread(per_response: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Give each token the advantage of its response, ``advantage * m``; the same tensor serves as returns."""
    advantages = torch.where(mask.bool(), per_response.to(rewards.dtype).unsqueeze(-1), 0.0)
    return advantages, advantages


def _group_means(scores: Tensor, group: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each row the mean of its group (0 for a group of one) and the size of the group."""
    mean, _, count = group_mean_std(scores, group)
    return mean[group], count[group]


def _whiten(x: Tensor, keep: Tensor) -> Tensor:
    """Whiten x over the tokens of the batch: ``(x - masked_mean(x, m)) / sqrt(masked_var(x, m) + 1e-8) * m``.

    Raises: ValueError when the mask keeps fewer than two tokens.
    """
    count = int(keep.sum())
    centred, squares = centre(x, keep, whitening_mean(torch.where(keep, x, 0.0).sum(dim=-1), count))
    return centred * whitening_scale(squares, count)


def whitening_mean(sums: Tensor, count: int) -> float:
    """Return the mean over all tokens, given the sum of each row, (B,).

    Raises: ValueError when there are fewer than two tokens.
    """
    if count < 2:
        raise ValueError(f"whitening needs at least 2 elements inside the response mask, it keeps {count}")
    return sums.sum(dtype=torch.float64).item() / count


def centre(x: Tensor, keep: Tensor, mean: float) -> tuple[Tensor, Tensor]:
    """Subtract the mean inside the mask; return x, (B, T), and the sum of the squares of each row, (B,) float64."""
    centred = torch.where(keep, x - mean, 0.0)
    return centred, centred.double().square().sum(dim=-1)


def whitening_scale(squares: Tensor, count: int) -> float:
    """Return the factor that scales centred tokens to variance 1, given the sum of squares of each row, (B,)."""
    return float((squares.sum().item() / (count - 1) + _WHITEN_EPSILON) ** -0.5)


@register_adv_est(AdvantageEstimator.GAE)
def compute_gae_advantage_return(
    token_level_rewards: Tensor,
    values: Tensor,
    response_mask: Tensor,
    gamma: float | None = None,
    lam: float | None = None,
    config: AdvantageConfig | None = None,
    **unused: Input,
) -> tuple[Tensor, Tensor]:
    """Estimate whitened advantages by exponentially weighted TD errors, and the returns that the critic learns.

    Plain form, from the last sampled token to the first, V' and A' being those of the next sampled token::

        A[t] = r[t] + gamma * V' - V[t] + gamma * lam * A'
        returns[t] = A[t] + V[t]

    Tokens outside the mask (tool answers, padding) are skipped, and steps count from one sampled token to the next. The
    recursion runs as one linear scan over time: with H = gamma * (V + lam * A), which a token hands to the sampled one
    before it, H[t] = gamma * ((1 - lam) * V[t] + lam * (r[t] + H')) and returns[t] = r[t] + H'.

    Source: Schulman et al. (arXiv:1506.02438), equation 16.

    Args: rewards, values and mask are (B, T); gamma and lam default to the config's, else to 1.
    Raises: ValueError when the mask holds fewer than two tokens.
    """
    gamma = _option(gamma, config, "gamma", 1.0)
    lam = _option(lam, config, "lam", 1.0)
    advantages, returns = gae_of_rows(token_level_rewards, values, response_mask, gamma, lam)
    return _whiten(advantages, response_mask.bool()), returns


@torch.no_grad()
def gae_of_rows(
    token_level_rewards: Tensor, values: Tensor, response_mask: Tensor, gamma: float, lam: float
) -> tuple[Tensor, Tensor]:
    """Return advantages before whitening and returns, (B, T): each row by itself."""
    keep = response_mask.bool()
    rewards = torch.where(keep, token_level_rewards, 0.0)
    values = torch.where(keep, values, 0.0)
    handed = reverse_scan(gamma * ((1 - lam) * values + lam * rewards), keep, gamma * lam)  # H
    following = F.pad(handed[:, 1:], (0, 1))  # H', zero after the last token
    returns = torch.where(keep, rewards + following, 0.0)
    return returns - values, returns


@register_adv_est(AdvantageEstimator.GRPO_VECTORIZED)
@register_adv_est(AdvantageEstimator.GRPO)
def compute_grpo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageConfig | None = None,
    **unused: Input,
) -> tuple[Tensor, Tensor]:
    """Score each response against the other samples of its prompt: ``(S - mean) / (std + epsilon) * m``.

    Source: DeepSeekMath (arXiv:2402.03300), section 4.1; without the deviation, Dr. GRPO (arXiv:2503.20783).

    Args: rewards and mask are (B, T); index holds the (B,) prompt uid. Normalisation is off when the argument or
        the config says so.
    Returns: (advantages, returns), one (B, T) tensor for both, zero where the mask is. A group of one keeps its score.
    Raises: ValueError when the inputs disagree on B.
    """
    with torch.no_grad():
        scores, group = _scores(token_level_rewards, response_mask, index)
        mean, std, _ = group_mean_std(scores, group, eps=0.0)
        advantages = scores - mean[group]
        if norm_adv_by_std_in_grpo and _option(None, config, "norm_adv_by_std_in_grpo", True):
            advantages = advantages / (std[group] + epsilon)
    return _spread(advantages, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.GRPO_PASSK)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    config: AdvantageConfig | None = None,
    **unused: Input,
) -> tuple[Tensor, Tensor]:
    """Credit only the best sample of a prompt: ``(best - second best) / (std + epsilon) * m``, and 0 for the others.

    Source: Pass@k policy optimisation (arXiv:2503.19595).

    Raises: ValueError when a prompt has a single sample.
    """
    with torch.no_grad():
        scores, group = _scores(token_level_rewards, response_mask, index)
        size = group_count(group)
        if bool((size < 2).any()):
            raise WrongInput(
                "algorithm.adv_estimator=grpo_passk needs at least 2 samples of each prompt: "
                "set actor_rollout_ref.rollout.n to 2 or more"
            )
        by_score = torch.argsort(scores, descending=True, stable=True)
        order = by_score[torch.argsort(group[by_score], stable=True)]  # groups in turn, best first
        first = torch.cumsum(size, 0) - size
        best = order[first]
        lead = scores[best] - scores[order[first + 1]]
        if norm_adv_by_std_in_grpo and _option(None, config, "norm_adv_by_std_in_grpo", True):
            lead = lead / (group_mean_std(scores, group, eps=0.0)[1] + epsilon)
        advantages = torch.zeros_like(scores).index_copy(0, best, lead)
    return _spread(advantages, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS)
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    config: AdvantageConfig | None = None,
    gamma: float | None = None,
    **unused: Input,
) -> tuple[Tensor, Tensor]:
    """Whiten the discounted return of each token over the batch.

    Plain form, with the return R' of the next sampled token: ``returns[t] = r[t] + gamma * R'``. Tokens outside the
    mask (tool answers, padding) are skipped, and the discount counts steps from one sampled token to the next.

    Source: REINFORCE++ (arXiv:2501.03262), section 3.

    Raises: ValueError when the mask holds fewer than two tokens.
    """
    returns, _ = discounted_returns(token_level_rewards, response_mask, _option(gamma, config, "gamma", 1.0))
    return _whiten(returns, response_mask.bool()), returns


@torch.no_grad()
def discounted_returns(token_level_rewards: Tensor, response_mask: Tensor, gamma: float) -> tuple[Tensor, Tensor]:
    """Return the discounted returns of the tokens, (B, T), twice the same tensor: each row by itself."""
    keep = response_mask.bool()
    returns = reverse_scan(torch.where(keep, token_level_rewards, 0.0), keep, gamma)
    returns = torch.where(keep, returns, 0.0)
    return returns, returns


@register_adv_est(AdvantageEstimator.REINFORCE_PLUS_PLUS_BASELINE)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    epsilon: float = 1e-6,
    **unused: Input,
) -> tuple[Tensor, Tensor]:
    """Subtract the mean of the prompt's samples and whiten over the tokens of the batch: ``whiten((S - mean) * m)``.

    ``epsilon`` has no effect: whitening has another one.

    Source: REINFORCE++ (arXiv:2501.03262), the variant with a baseline.

    Raises: ValueError when the mask holds fewer than two tokens.
    """
    centred, _ = centred_scores(token_level_rewards, response_mask, index)
    advantages = _whiten(centred, response_mask.bool())
    return advantages, advantages


def centred_scores(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None
) -> tuple[Tensor, Tensor]:
    """Subtract the mean of the prompt's samples: ``(S - mean) * m``, returned as advantages and as returns."""
    with torch.no_grad():
        scores, group = _scores(token_level_rewards, response_mask, index)
        mean, _ = _group_means(scores, group)
    return _spread(scores - mean, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.RLOO_VECTORIZED)
@register_adv_est(AdvantageEstimator.RLOO)
def compute_rloo_outcome_advantage(
    token_level_rewards: Tensor, response_mask: Tensor, index: Index | None = None, **unused: Input
) -> tuple[Tensor, Tensor]:
    """Score each response against the mean of the prompt's other samples.

    Plain form, for a group of n: ``(S - (sum of the group - S) / (n - 1)) * m = (S - mean) * n / (n - 1) * m``. A group
    of one keeps its score, which is the policy gradient without a baseline; an advantage of zero would drop the prompt.

    Source: Back to Basics (arXiv:2402.14740), section 3.3.
    """
    with torch.no_grad():
        scores, group = _scores(token_level_rewards, response_mask, index)
        mean, count = _group_means(scores, group)
        advantages = (scores - mean) * torch.where(count > 1, count / (count - 1).clamp(min=1), 1.0)
    return _spread(advantages, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.OPO)
def compute_opo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    lengths: Tensor | None = None,
    **unused: Input,
) -> tuple[Tensor, Tensor]:
    """Subtract the length-weighted mean of the prompt's samples, the baseline of least variance.

    Plain form, with L the lengths of the group: ``(S - (L * S).sum() / L.sum()) * m``.

    ``lengths`` (B,) are the tokens of the responses, by default those inside the mask.

    Source: On-policy RL with optimal reward baseline (arXiv:2505.23585), section 3.
    """
    with torch.no_grad():
        scores, group = _scores(token_level_rewards, response_mask, index)
        size = group_count(group)
        length = (response_mask.sum(dim=-1) if lengths is None else lengths).double()
        weighted = group_sum(length * scores, group, len(size)) / group_sum(length, group, len(size)).clamp(min=1)
        advantages = scores - weighted.masked_fill(size <= 1, 0.0)[group]
    return _spread(advantages, token_level_rewards, response_mask)


@register_adv_est(AdvantageEstimator.REMAX)
def compute_remax_outcome_advantage(
    token_level_rewards: Tensor, reward_baselines: Tensor, response_mask: Tensor, **unused: Input
) -> tuple[Tensor, Tensor]:
    """Subtract the score of the greedy response from the reward to come of each token.

    Plain form: ``returns[t] = sum(r[t:] * m[t:]) * m[t]`` and ``advantages = returns - baseline * m``.

    Source: ReMax (arXiv:2310.10505), section 4.

    Args: rewards and mask are (B, T), baselines (B,).
    """
    with torch.no_grad():
        keep = response_mask.bool()
        rewards = torch.where(keep, token_level_rewards, 0.0)
        returns = torch.where(keep, rewards.flip(-1).cumsum(-1).flip(-1), 0.0)
        advantages = torch.where(keep, returns - reward_baselines.unsqueeze(-1), 0.0)
    return advantages, returns


@register_adv_est(AdvantageEstimator.GPG)
def compute_gpg_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index: Index | None = None,
    f_norm: float = 1.0,
    alpha: float = 1.0,
    **unused: Input,
) -> tuple[Tensor, Tensor]:
    """Centre the scores of each prompt, and divide them by the share of responses with a nonzero score.

    Plain form: ``alpha * B / max(1, number of non-zero S) * (S - mean) / f_norm * m``.

    Source: GPG (arXiv:2504.02546), section 3.

    """
    with torch.no_grad():
        scores, group = _scores(token_level_rewards, response_mask, index)
        mean, _ = _group_means(scores, group)
        scale = alpha * len(scores) / scores.count_nonzero().clamp(min=1)
        advantages = scale * (scores - mean) / f_norm
    return _spread(advantages, token_level_rewards, response_mask)


# Established names of a second implementation of the same formulas.
compute_grpo_vectorized_outcome_advantage = compute_grpo_outcome_advantage
compute_rloo_vectorized_outcome_advantage = compute_rloo_outcome_advantage


# Policy filtration

_MIN_WEIGHT = 1e-8


def pf_ppo_weights(scores: Tensor, reweight_method: str, weight_pow: float) -> Tensor:
    """Return the sampling weight of each score, (B,).

    Raises: ValueError for an unknown method.
    """
    best = scores == scores.max()
    if reweight_method == "pow":
        weights = scores.abs().pow(weight_pow)
    elif reweight_method == "max_min":
        weights = (best | (scores == scores.min())).to(scores.dtype)
    elif reweight_method == "max_random":
        weights = torch.where(best, 0.4, 0.1)
    else:
        raise WrongInput(
            f"algorithm.pf_ppo.reweight_method must be pow, max_min or max_random, got {reweight_method!r}"
        )
    return weights.clamp(min=_MIN_WEIGHT)


def compute_pf_ppo_reweight_data(
    data: DataProto, reweight_method: str = "pow", weight_pow: float = 2.0, generator: torch.Generator | None = None
) -> DataProto:
    """Draw as many rows as the batch has, with replacement, weighted by their ``token_level_scores``.

    Policy filtration learns more often from responses whose reward can be trusted. Lists of the batch's length in
    ``meta_info`` are drawn in the same way.

    Source: PF-PPO (arXiv:2409.06957), section 3.

    Raises: ValueError for an unknown method.
    """
    tensors = tensors_of(data)
    scores = tensors["token_level_scores"].sum(-1)
    used = tensors.get("response_mask", torch.ones(len(scores), 1)).any(-1)  # rows without tokens only pad the batch
    weights = torch.zeros_like(scores)
    weights[used] = pf_ppo_weights(scores[used], reweight_method, weight_pow)
    rows = torch.multinomial(weights, len(weights), replacement=True, generator=generator)
    drawn = data.select_idxs(rows)
    drawn.meta_info = {
        key: [value[i] for i in rows.tolist()] if isinstance(value, list) and len(value) == len(rows) else value
        for key, value in data.meta_info.items()
    }
    return drawn
