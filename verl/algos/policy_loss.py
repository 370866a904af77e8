"""Policy losses, each the formula of its paper over the (B, T) tokens of the sampled responses.

A loss of this module is ``fn(inputs, config) -> TokenLoss``: it gets inputs that are zero outside the mask and returns
the loss of each token. ``reduce_tokens`` weighs, masks and sums all of them. ``register_token_loss`` also enters the
loss under ``PolicyLossFn``, the signature of the established verl interface, which returns ``(pg_loss, pg_clipfrac,
ppo_kl, pg_clipfrac_lower)``: the loss aggregated by ``effective_loss_agg_mode``, the other three as means over tokens.
A user may register a loss of either kind. ``policy_loss_sums`` gives a worker the sums of any registered loss, because
an engine adds micro-batches and ranks before it divides.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from verl.algos.aggregate import Sum, agg_unit, by_length, rows_by_share, sum_of_mean, unit_count
from verl.algos.names import POLICY_LOSS_ALIASES
from verl.algos.selection import TokenSelector as TokenSelector
from verl.algos.selection import Whole as Whole
from verl.algos.selection import need as need
from verl.algos.selection import select_clip_cov as select_clip_cov
from verl.algos.selection import select_kl_cov as select_kl_cov
from verl.algos.selection import token_covariances as token_covariances
from verl.algos.selection import token_keys as token_keys
from verl.algos.token_loss import MAX_LOG_RATIO, ActorLossConfig, ClipOptions, clip_range
from verl.algos.token_loss import LossInputs as LossInputs
from verl.algos.token_loss import PolicyLossSums as PolicyLossSums
from verl.algos.token_loss import TokenLoss as TokenLoss
from verl.algos.token_loss import reduce_tokens as reduce_tokens
from verl.errors import WrongInput, WrongSetting

PolicyLossOutput = tuple[Tensor, Tensor, Tensor, Tensor]

_MAX_SEQUENCE_LOG_RATIO = 10.0


# Registry


class PolicyLossFn(Protocol):
    """A loss by the signature of the established verl interface. With a selector it also takes ``selection`` (B, T)."""

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str,
        config: ActorLossConfig | None,
        rollout_is_weights: Tensor | None = None,
    ) -> PolicyLossOutput: ...


TokenLossFn = Callable[[LossInputs, Any], TokenLoss]


@dataclass(frozen=True)
class _Entry:
    """A registered loss and its properties."""

    fn: PolicyLossFn | None
    loss_agg_mode: str | None = None
    selector: TokenSelector | None = None


_Fn = TypeVar("_Fn", bound=PolicyLossFn)
_TokenFn = TypeVar("_TokenFn", bound=TokenLossFn)

POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
_ENTRIES: dict[str, _Entry] = {}


def register_policy_loss(
    name: str, loss_agg_mode: str | None = None, selector: TokenSelector | None = None
) -> Callable[[_Fn], _Fn]:
    """Register the decorated loss under a name for ``actor.policy_loss.loss_mode``; the last registration wins.

    A loss aggregates by ``agg_loss`` without a length: the workers replace the mask's width by the configured length.

    Args: ``loss_agg_mode`` is set by a loss that aggregates in one way only, ``selector`` by a loss that treats some
        tokens differently and chooses them over the whole mini-batch.
    """

    def enter(fn: _Fn) -> _Fn:
        POLICY_LOSS_REGISTRY[name] = fn
        _ENTRIES[name] = _Entry(fn, loss_agg_mode, selector)
        return fn

    return enter


def register_token_loss(
    name: str, only_mode: str | None = None, selector: TokenSelector | None = None, needs_config: bool = True
) -> Callable[[_TokenFn], _TokenFn]:
    """Register the decorated formula under a name for ``actor.policy_loss.loss_mode``; the last registration wins.

    Args:
        only_mode: mode of a loss that aggregates in one way only, whatever the caller asks for.
        selector: chooses ``inputs.selection`` over the whole mini-batch; a caller without a selection gets one over its
            own tensors.
        needs_config: whether the formula reads the actor's configuration.
    """

    def enter(fn: _TokenFn) -> _TokenFn:
        register_policy_loss(name, only_mode, selector)(_established(name, fn, only_mode, selector, needs_config))
        return fn

    return enter


def _established(
    name: str, fn: TokenLossFn, only_mode: str | None, selector: TokenSelector | None, needs_config: bool
) -> Callable[..., PolicyLossOutput]:
    """Wrap a formula over tokens in the signature of the established verl interface, which returns means."""

    def established(
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        loss_agg_mode: str = only_mode or "token-mean",
        config: ActorLossConfig | None = None,
        rollout_is_weights: Tensor | None = None,
        selection: Tensor | None = None,
    ) -> PolicyLossOutput:
        if needs_config:
            need(config, name)
        mode = only_mode or loss_agg_mode
        inputs = LossInputs(
            old_log_prob, log_prob, advantages, response_mask, mode, config, rollout_is_weights, selection
        ).inside_mask()
        if selector is not None and selection is None:
            inputs = dataclasses.replace(inputs, selection=selector(inputs, _drawn_keys(response_mask), Whole()))
        return _means(reduce_tokens(fn(inputs, config), inputs), response_mask)

    established.__doc__ = fn.__doc__
    established.__module__ = fn.__module__
    established.__name__ = established.__qualname__ = f"compute_policy_loss_{name}"
    return established


def _drawn_keys(mask: Tensor) -> Tensor:
    """Return a random number for each token, (B, T), by torch's generator."""
    draw = int(torch.randint(1 << 31, ()).item())
    return token_keys(torch.arange(mask.shape[0], device=mask.device), mask.shape[1], draw)


def _means(sums: PolicyLossSums, response_mask: Tensor) -> PolicyLossOutput:
    """Divide sums by the counts of the given mask."""
    lengths = response_mask.sum(-1)
    total = sums.loss.total
    tokens = unit_count(lengths, "token").to(total.dtype)
    loss = total / unit_count(lengths, sums.loss.unit).to(total.dtype)
    return loss, sums.clipped / tokens, sums.kl / tokens, sums.clipped_low / tokens


def _entry(name: str) -> _Entry:
    """Return the registered properties of a loss; default ones if it was put into ``POLICY_LOSS_REGISTRY`` directly."""
    entry = _ENTRIES.get(name, _Entry(None))
    return entry if entry.fn is POLICY_LOSS_REGISTRY.get(name) else _Entry(None)


def get_policy_loss_fn(name: str) -> PolicyLossFn:
    """Return a registered loss, also by another spelling of its name.

    Raises: ValueError for an unknown name.
    """
    name = POLICY_LOSS_ALIASES.get(name, name)
    if name not in POLICY_LOSS_REGISTRY:
        raise WrongInput(
            f"Unsupported loss mode: {name}: "  # callers match these words
            f"actor_rollout_ref.actor.policy_loss.loss_mode must be one of {sorted(POLICY_LOSS_REGISTRY)}, got {name!r}"
        )
    return POLICY_LOSS_REGISTRY[name]


def effective_loss_agg_mode(name: str, loss_agg_mode: str) -> str:
    """Return the mode by which the named loss aggregates when the config asks for ``loss_agg_mode``."""
    return _entry(name).loss_agg_mode or loss_agg_mode


def get_token_selector(name: str) -> TokenSelector | None:
    """Return the function that chooses tokens for the named loss over a whole mini-batch, or None."""
    return _entry(name).selector


def policy_loss_sums(
    name: str, inputs: LossInputs, length: int | None = None, shares: Tensor | None = None
) -> PolicyLossSums:
    """Compute the named loss over a micro-batch (B, T) as sums: mean x count.

    A loss that a user registered can only divide by the counts of the tensors that it is given. The losses of this
    module are computed in the same way, so that all losses reach the engine by one path. Handing over their sums
    directly would save two roundings, and change the losses of a run with several mini-batches by 1e-7 of their value.

    Args: ``length`` replaces the width of the mask as the constant of ``seq-mean-token-sum-norm``; ``shares`` (B,) say
        which share of its trajectory's tokens each row holds.
    Raises: ValueError for an unknown name.
    """
    parts = rows_by_share(shares, effective_loss_agg_mode(name, inputs.loss_agg_mode))
    if parts is None:
        return _sums(name, inputs, length)
    found = [(share, _sums(name, _of_rows(inputs, rows), length)) for share, rows in parts]
    loss = torch.stack([sums.loss.total * share for share, sums in found]).sum()
    statistics = [torch.stack([sums.clipped, sums.kl, sums.clipped_low]) for _, sums in found]
    counted = torch.stack(statistics).sum(0).unbind()
    return PolicyLossSums(Sum(loss, found[0][1].loss.unit), *counted)


def _of_rows(inputs: LossInputs, rows: Tensor) -> LossInputs:
    """Return the inputs of some rows."""
    tensors: dict[str, Any] = {name: value[rows] for name, value in vars(inputs).items() if isinstance(value, Tensor)}
    return dataclasses.replace(inputs, **tensors)


def _sums(name: str, inputs: LossInputs, length: int | None) -> PolicyLossSums:
    loss_fn: Callable[..., PolicyLossOutput] = get_policy_loss_fn(name)
    # Only losses with a selector have the parameter ``selection``.
    arguments = {key: value for key, value in vars(inputs).items() if key != "selection" or value is not None}
    mean, clipped, kl, clipped_low = loss_fn(**arguments)
    mask = inputs.response_mask
    mode = effective_loss_agg_mode(name, inputs.loss_agg_mode)
    loss = by_length(sum_of_mean(mean, mask, agg_unit(mode)), mode, mask.shape[-1], length)
    counted = [sum_of_mean(value, mask, "token").total for value in (clipped, kl, clipped_low)]
    return PolicyLossSums(loss, *counted)


# Losses


@register_token_loss("vanilla")
def vanilla(inputs: LossInputs, config: ClipOptions) -> TokenLoss:
    """Clip the ratio of each token, and bound the loss where the advantage is negative.

    Source: PPO (arXiv:1707.06347), equation 7; dual clip (arXiv:1912.09729), section 4.

    Raises: ValueError, also an AssertionError, when ``clip_ratio_c`` is not above 1.
    """
    if not config.clip_ratio_c > 1.0:
        raise WrongSetting(f"actor_rollout_ref.actor.clip_ratio_c must be above 1, got {config.clip_ratio_c}")
    low, high = clip_range(config)
    ratio = inputs.ratio
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.maximum(plain, clipped)
    bound = -inputs.advantages * config.clip_ratio_c
    is_bounded = (inputs.advantages < 0) & (bound < loss)
    return TokenLoss(torch.where(is_bounded, bound, loss), is_clipped=clipped > plain, is_bounded=is_bounded)


@dataclass(frozen=True)
class _Clips:
    """The options of ``vanilla`` as plain numbers."""

    clip_ratio_low: float
    clip_ratio_high: float
    clip_ratio_c: float
    clip_ratio: float = 0.0


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
    inputs = LossInputs(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, None).inside_mask()
    return _means(reduce_tokens(vanilla(inputs, _Clips(low, high, clip_ratio_c)), inputs), response_mask)


@register_token_loss("gspo", only_mode="seq-mean-token-mean")
def gspo(inputs: LossInputs, config: ClipOptions) -> TokenLoss:
    """Clip the length-normalised ratio of the whole response; its gradient is spread over the tokens.

    Source: GSPO (arXiv:2507.18071), section 4.3 (GSPO-token).
    """
    low, high = clip_range(config)
    mean = inputs.mean_of_response(inputs.log_ratio).detach()  # (B, 1)
    log_ratio = inputs.log_prob - inputs.log_prob.detach() + mean
    ratio = log_ratio.clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
    return TokenLoss(torch.maximum(plain, clipped), is_clipped=clipped > plain, kl=-inputs.log_ratio)


@register_token_loss("gpg", needs_config=False)
def gpg(inputs: LossInputs, config: ActorLossConfig | None) -> TokenLoss:
    """Compute the plain policy gradient, without ratio or clip.

    Source: GPG (arXiv:2504.02546), section 3.
    """
    return TokenLoss(-inputs.advantages * inputs.log_prob, kl=torch.zeros_like(inputs.log_prob))


@register_token_loss("geo_mean", only_mode="seq-mean-token-mean")
def geo_mean(inputs: LossInputs, config: ClipOptions) -> TokenLoss:
    """Weigh each response by the geometric mean of its token ratios, clipped token by token in the log domain.

    Source: GMPO (arXiv:2507.20673), section 3.
    """
    low, high = clip_range(config)
    advantages = inputs.advantages
    sign = advantages.sign()
    clamped = inputs.log_ratio.clamp(-low, high)
    pessimistic = sign * torch.minimum(sign * inputs.log_ratio, sign * clamped)
    ratio = inputs.mean_of_response(pessimistic).clamp(max=MAX_LOG_RATIO).exp()  # (B, 1)
    loss = -inputs.mean_of_response(advantages) * ratio
    is_outside = clamped != inputs.log_ratio
    return TokenLoss(
        loss.expand_as(advantages),  # the loss of a response is the mean over its tokens
        is_clipped=is_outside & (advantages > 0),
        is_bounded=is_outside & (advantages < 0),
        kl=-inputs.log_ratio,
        weights=None if inputs.rollout_is_weights is None else _geometric_mean(inputs, inputs.rollout_is_weights),
    )


def _geometric_mean(inputs: LossInputs, weights: Tensor) -> Tensor:
    """Return the geometric mean of the importance weights of each response, (B, 1)."""
    return inputs.mean_of_response((weights + 1e-10).log()).exp()


@register_token_loss("cispo")
def cispo(inputs: LossInputs, config: ClipOptions) -> TokenLoss:
    """Weigh the policy gradient of each token by its clipped ratio, so that no token loses its gradient.

    Source: MiniMax-M1 (arXiv:2506.13585), section 3.1 (CISPO).
    """
    low, high = clip_range(config)
    ratio = inputs.ratio.detach()
    weight = ratio.clamp(1 - low, 1 + high)
    return TokenLoss(-weight * inputs.advantages * inputs.log_prob, is_clipped=weight != ratio)


@register_token_loss("sapo")
def sapo(inputs: LossInputs, config: ActorLossConfig) -> TokenLoss:
    """Let the gradient of a token fade as its ratio leaves 1, by a sigmoid with a temperature for each sign.

    Source: SAPO (arXiv:2511.20347), section 3, which aggregates by ``seq-mean-token-mean``.
    """
    tau_pos = torch.full_like(inputs.advantages, config.policy_loss.tau_pos)
    tau = torch.where(inputs.advantages > 0, tau_pos, config.policy_loss.tau_neg)
    gate = 4 / tau * torch.sigmoid(tau * (inputs.ratio - 1))
    return TokenLoss(-inputs.advantages * gate, kl=-inputs.log_ratio)


@register_token_loss("clip_cov", selector=select_clip_cov)
def clip_cov(inputs: LossInputs, config: ClipOptions) -> TokenLoss:
    """Clip the ratio of each token, and drop a few tokens of high covariance from the loss.

    Source: arXiv:2505.22617, section 4.3 (Clip-Cov).
    """
    assert inputs.selection is not None, "the adapter selects where the caller has not"
    low, high = clip_range(config)
    ratio = inputs.ratio
    plain = -inputs.advantages * ratio
    clipped = -inputs.advantages * ratio.clamp(1 - low, 1 + high)
    loss = torch.where(inputs.selection, 0.0, torch.maximum(plain, clipped))
    return TokenLoss(loss, is_clipped=inputs.selection)


@register_token_loss("kl_cov", selector=select_kl_cov)
def kl_cov(inputs: LossInputs, config: ActorLossConfig) -> TokenLoss:
    """Leave the ratio unclipped, and penalise the log-ratio of a few tokens of the highest covariance.

    Source: arXiv:2505.22617, section 4.3 (KL-Cov).
    """
    assert inputs.selection is not None, "the adapter selects where the caller has not"
    coefficient = 1.0 if config.policy_loss.ppo_kl_coef is None else config.policy_loss.ppo_kl_coef
    distance = inputs.log_ratio.abs()
    penalty = torch.where(inputs.selection, coefficient * distance, 0.0)
    return TokenLoss(-inputs.advantages * inputs.ratio + penalty, kl=distance)


# Names of the established verl interface
compute_policy_loss_vanilla = POLICY_LOSS_REGISTRY["vanilla"]
compute_policy_loss_gspo = POLICY_LOSS_REGISTRY["gspo"]
compute_policy_loss_gpg = POLICY_LOSS_REGISTRY["gpg"]
compute_policy_loss_geo_mean = POLICY_LOSS_REGISTRY["geo_mean"]
compute_policy_loss_cispo = POLICY_LOSS_REGISTRY["cispo"]
compute_policy_loss_sapo = POLICY_LOSS_REGISTRY["sapo"]
compute_policy_loss_clip_cov = POLICY_LOSS_REGISTRY["clip_cov"]
compute_policy_loss_kl_cov = POLICY_LOSS_REGISTRY["kl_cov"]
