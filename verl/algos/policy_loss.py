"""Policy losses, each over the (B, T) tokens of the sampled responses.

A registered loss has the signature of ``PolicyLossFn`` and returns ``(pg_loss, pg_clipfrac, ppo_kl,
pg_clipfrac_lower)``: the loss aggregated by ``effective_loss_agg_mode``, the rest as means over tokens. What the inputs
hold outside the mask, NaN included, reaches neither the loss nor a gradient.
"""

from collections.abc import Callable
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from verl.algos.aggregate import agg_loss
from verl.utils.torch_functional import masked_mean

_MAX_LOG_RATIO = 20.0
_MAX_SEQUENCE_LOG_RATIO = 10.0

PolicyLossOutput = tuple[Tensor, Tensor, Tensor, Tensor]


class PolicyLossConfig(Protocol):
    """What the losses read of ``actor_rollout_ref.actor``."""

    @property
    def clip_ratio(self) -> float: ...
    @property
    def clip_ratio_low(self) -> float | None: ...
    @property
    def clip_ratio_high(self) -> float | None: ...
    @property
    def clip_ratio_c(self) -> float: ...


class PolicyLossFn(Protocol):
    """The signature of a registered loss."""

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: PolicyLossConfig | None,
        rollout_is_weights: Tensor | None = None,
    ) -> PolicyLossOutput: ...


_Fn = TypeVar("_Fn", bound=PolicyLossFn)

POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
_FIXED_AGG_MODE: dict[str, str] = {}


class ClipRatioError(ValueError, AssertionError):
    """The constant of the dual clip is not above one."""


def register_policy_loss(name: str, loss_agg_mode: str | None = None) -> Callable[[_Fn], _Fn]:
    """Enter the decorated loss under a name for ``actor.policy_loss.loss_mode``; the last one entered wins.

    ``loss_agg_mode`` is given by a loss that aggregates in one way only.
    """

    def enter(fn: _Fn) -> _Fn:
        POLICY_LOSS_REGISTRY[name] = fn
        _FIXED_AGG_MODE.pop(name, None)
        if loss_agg_mode is not None:
            _FIXED_AGG_MODE[name] = loss_agg_mode
        return fn

    return enter


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return a registered loss.

    Raises: ValueError for an unknown name.
    """
    if name not in POLICY_LOSS_REGISTRY:
        raise ValueError(
            f"actor_rollout_ref.actor.policy_loss.loss_mode must be one of {sorted(POLICY_LOSS_REGISTRY)}, got {name!r}"
        )
    return POLICY_LOSS_REGISTRY[name]


def effective_loss_agg_mode(name: str, loss_agg_mode: str) -> str:
    """Return the mode by which the named loss aggregates when the config asks for ``loss_agg_mode``."""
    return _FIXED_AGG_MODE.get(name, loss_agg_mode)


def _clip_range(config: PolicyLossConfig) -> tuple[float, float]:
    """Return how far the ratio may fall and rise before it is clipped."""
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (config.clip_ratio if low is None else low), (config.clip_ratio if high is None else high)


def _need(config: PolicyLossConfig | None, name: str) -> PolicyLossConfig:
    if config is None:
        raise ValueError(f"policy loss {name!r} reads clip_ratio from the actor's config: pass config")
    return config


def _inside(mask: Tensor, *tensors: Tensor) -> list[Tensor]:
    """Return the tensors with zeros outside the mask."""
    keep = mask.bool()
    return [torch.where(keep, x, 0.0) for x in tensors]


def _weighted(loss: Tensor, mask: Tensor, weights: Tensor | None) -> Tensor:
    """Multiply the importance weights of the rollout in, where there are any."""
    return loss if weights is None else loss * _inside(mask, weights)[0]


def clipped_policy_loss(
    log_ratio: Tensor, advantages: Tensor, low: float, high: float, dual: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return, for each token, the dual-clipped loss, whether the upper clip acted, and whether the lower one did.

    Source: PPO (arXiv:1707.06347), equation 7; dual clip, arXiv:1912.09729, section 4.
    """
    ratio = log_ratio.exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    upper = plain.maximum(clipped)
    bound = -advantages * dual
    negative = advantages < 0
    loss = torch.where(negative, upper.minimum(bound), upper)
    return loss, clipped > plain, (upper > bound) & negative


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
    config = _need(config, "vanilla")
    return _vanilla(
        old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, *_clip_range(config), config.clip_ratio_c,
        rollout_is_weights,
    )  # fmt: skip


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
    old_log_prob, log_prob, advantages = _inside(mask, old_log_prob, log_prob, advantages)
    log_ratio = (log_prob - old_log_prob).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    loss, clipped, clipped_low = clipped_policy_loss(log_ratio, advantages, low, high, dual)
    return (
        agg_loss(_weighted(loss, mask, weights), mask, loss_agg_mode),
        masked_mean(clipped.float(), mask),
        masked_mean(-log_ratio.detach(), mask),
        masked_mean(clipped_low.float(), mask),
    )


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
    mask = response_mask
    low, high = _clip_range(_need(config, "gspo"))
    old_log_prob, log_prob, advantages = _inside(mask, old_log_prob, log_prob, advantages)
    log_ratio = log_prob - old_log_prob
    of_sequence = log_ratio.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True).clamp(min=1)
    ratio = (log_prob - log_prob.detach() + of_sequence.detach()).clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()
    plain, clipped = -advantages * ratio, -advantages * ratio.clamp(1 - low, 1 + high)
    loss = _weighted(plain.maximum(clipped), mask, rollout_is_weights)
    return (
        agg_loss(loss, mask, "seq-mean-token-mean"),
        masked_mean((clipped > plain).float(), mask),
        masked_mean(-log_ratio.detach(), mask),
        torch.zeros_like(loss[0, 0].detach()),
    )


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
    log_prob, advantages = _inside(response_mask, log_prob, advantages)
    loss = _weighted(-log_prob * advantages, response_mask, rollout_is_weights)
    zero = torch.zeros((), dtype=loss.dtype, device=loss.device)
    return agg_loss(loss, response_mask, loss_agg_mode), zero, zero.clone(), zero.clone()


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
    mask = response_mask
    low, high = _clip_range(_need(config, "geo_mean"))
    old_log_prob, log_prob, advantages = _inside(mask, old_log_prob, log_prob, advantages)
    log_ratio = log_prob - old_log_prob
    clamped = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    pessimistic = sign * (sign * log_ratio).minimum(sign * clamped)
    loss = -masked_mean(advantages, mask, axis=-1) * masked_mean(pessimistic, mask, axis=-1).exp()
    if rollout_is_weights is not None:
        log_weights = (_inside(mask, rollout_is_weights)[0] + 1e-10).log()
        loss = loss * masked_mean(log_weights, mask, axis=-1).exp()
    acted = clamped != log_ratio
    return (
        loss.mean(),
        masked_mean((acted & (advantages > 0)).float(), mask),
        masked_mean(-log_ratio.detach(), mask),
        masked_mean((acted & (advantages < 0)).float(), mask),
    )


__all__ = [
    "POLICY_LOSS_REGISTRY",
    "ClipRatioError",
    "PolicyLossConfig",
    "PolicyLossFn",
    "PolicyLossOutput",
    "clipped_policy_loss",
    "compute_policy_loss",
    "compute_policy_loss_geo_mean",
    "compute_policy_loss_gpg",
    "compute_policy_loss_gspo",
    "compute_policy_loss_vanilla",
    "effective_loss_agg_mode",
    "get_policy_loss_fn",
    "register_policy_loss",
]
