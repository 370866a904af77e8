"""Policy losses, each over the (B, T) tokens of the sampled responses.

A registered loss has the signature of ``PolicyLossFn`` and returns ``(pg_loss, pg_clipfrac, ppo_kl,
pg_clipfrac_lower)``: the loss aggregated by ``effective_loss_agg_mode``, the other three as means over tokens. Values
outside the mask, NaN included, reach neither the loss nor a gradient.

The losses of this module compute sums (``PolicyLossSums``), because an engine adds micro-batches and ranks before it
divides. ``_register_sums`` puts them under the established signature, which returns means. ``policy_loss_sums`` gives a
worker the sums of any registered loss, also of one that a user registered.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, FunctionCtx, once_differentiable

from verl.algos.aggregate import Sum, agg_unit, by_length, row_weights, rows_by_share, sum_of_mean, unit_count
from verl.algos.names import POLICY_LOSS_ALIASES, POLICY_LOSSES
from verl.base_config import WrongInput
from verl.utils.numerics.seeding import GOLDEN, MIX_FACTOR, mix

PolicyLossOutput = tuple[Tensor, Tensor, Tensor, Tensor]

MAX_LOG_RATIO = 20.0
_MAX_SEQUENCE_LOG_RATIO = 10.0


# Signatures


class PolicyLossOptions(Protocol):
    """The fields that the losses read of ``actor_rollout_ref.actor.policy_loss``."""

    clip_cov_ratio: float | None
    clip_cov_lb: float | None
    clip_cov_ub: float | None
    kl_cov_ratio: float | None
    ppo_kl_coef: float | None
    tau_pos: float
    tau_neg: float


class ActorLossConfig(Protocol):
    """The fields that the losses read of ``actor_rollout_ref.actor``."""

    @property
    def clip_ratio(self) -> float: ...
    @property
    def clip_ratio_low(self) -> float | None: ...
    @property
    def clip_ratio_high(self) -> float | None: ...
    @property
    def clip_ratio_c(self) -> float: ...
    @property
    def policy_loss(self) -> PolicyLossOptions: ...


class PolicyLossFn(Protocol):
    """The signature of a registered loss. A loss with a selector also takes ``selection`` (B, T)."""

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


@dataclass(frozen=True)
class LossInputs:
    """The arguments of ``PolicyLossFn``, and the ``selection`` (B, T) of a loss with a selector."""

    old_log_prob: Tensor
    log_prob: Tensor
    advantages: Tensor
    response_mask: Tensor
    loss_agg_mode: str
    config: ActorLossConfig | None
    rollout_is_weights: Tensor | None = None
    selection: Tensor | None = None


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


# Registry


@dataclass(frozen=True)
class _Entry:
    """A registered loss and its properties."""

    fn: PolicyLossFn | None
    loss_agg_mode: str | None = None
    selector: TokenSelector | None = None


_Fn = TypeVar("_Fn", bound=PolicyLossFn)

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


def _register_sums(
    name: str, only_mode: str | None = None, selector: TokenSelector | None = None
) -> Callable[[Callable[[LossInputs], PolicyLossSums]], Callable[..., PolicyLossOutput]]:
    """Register a loss that returns sums, and return it under the established signature, which returns means.

    A loss that aggregates in one way only gets ``only_mode``, whatever mode the caller asks for.
    """
    assert name in POLICY_LOSSES, "verl.algos.names lists the losses, so that a check without torch knows them"

    def enter(sums: Callable[[LossInputs], PolicyLossSums]) -> Callable[..., PolicyLossOutput]:
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
            mode = only_mode or loss_agg_mode
            inputs = LossInputs(
                old_log_prob, log_prob, advantages, response_mask, mode, config, rollout_is_weights, selection
            )
            return _means(sums(inputs), response_mask)

        for attribute in ("__name__", "__qualname__", "__doc__"):
            setattr(established, attribute, getattr(sums, attribute))
        return register_policy_loss(name, only_mode, selector)(established)

    return enter


def _means(sums: PolicyLossSums, response_mask: Tensor) -> PolicyLossOutput:
    """Divide sums by the counts of the given mask."""
    lengths = response_mask.sum(-1)
    total = sums.loss.total
    tokens = unit_count(lengths, "token").to(total.dtype)
    loss = total / unit_count(lengths, sums.loss.unit).to(total.dtype)
    return loss, sums.clipped / tokens, sums.kl / tokens, sums.clipped_low / tokens


def _entry(name: str) -> _Entry:
    """Return the properties of a loss; none if the caller wrote it into ``POLICY_LOSS_REGISTRY`` directly."""
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
    module take the same way, so that all losses have one way to the engine. To hand their sums over directly would save
    two roundings, and change the numbers of every run with several mini-batches by 1e-7 of their value.

    Args: ``length`` replaces the width of the mask as the constant of ``seq-mean-token-sum-norm``; ``shares`` (B,) are
        those of the rows in their trajectories.
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


# Evaluation in blocks of rows

BLOCK_ELEMENTS = {"cpu": 1 << 17}
BLOCK_ELEMENTS_DEFAULT = 1 << 25
"""Tokens per block: as many as fit a CPU's cache, or keep an accelerator busy."""

_INTEGERS = {4: torch.int32, 8: torch.int64}


class Rows:
    """The mask of a block of rows, with the number of tokens of each row: ``counts`` (b,)."""

    def __init__(self, mask: Tensor, dtype: torch.dtype) -> None:
        self.counts = mask.sum(-1)
        self.dtype = dtype
        self._bits = mask.bool().to(_INTEGERS[dtype.itemsize]).neg_()  # all bits set inside the mask

    def inside(self, values: Tensor) -> Tensor:
        """Return the values (b, T) in ``dtype``, zero outside the mask: ``where(mask, values, 0)``.

        It clears the bits of the numbers, which has no branch and is several times faster than ``torch.where``.
        """
        return (values.to(self.dtype).view(self._bits.dtype) & self._bits).view(self.dtype)


@dataclass
class TokenTerms:
    """The loss of each token of a block (b, T), zero outside the mask, and three sums over the block.

    ``slope()`` is the derivative of ``loss`` in the log-probability. The sums are those of ``PolicyLossSums``.
    """

    loss: Tensor
    slope: Callable[[], Tensor]
    kl: Tensor | float = 0.0
    clipped: Tensor | float = 0.0
    clipped_low: Tensor | float = 0.0


TokenFn = Callable[..., TokenTerms]
"""Takes ``Rows`` and blocks of tensors (b, T), whose values outside the mask are arbitrary."""


class _WithSlope(torch.autograd.Function):
    """Attach the known derivative of a scalar in a tensor."""

    @staticmethod
    def forward(ctx: FunctionCtx, variable: Tensor, value: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: BackwardCFunction, grad: Tensor) -> tuple[Tensor, None, None]:
        (slope,) = ctx.saved_tensors
        return slope * grad, None, None


def token_loss(fn: TokenFn, inputs: LossInputs) -> PolicyLossSums:
    """Sum a loss over tokens, each multiplied by its weight.

    Plain form: ``agg_sum(fn(log_prob, old_log_prob, advantages).loss * weights, response_mask, loss_agg_mode)``, with
    the gradient by autograd. Rows are independent, so this works on a few rows at a time: intermediate results stay in
    the cache, and the only allocation of the size of the batch is the gradient, which the formula of each loss gives in
    closed form.

    Args: ``fn`` gets blocks of rows of ``log_prob``, in fp32 or better, of ``old_log_prob``, ``advantages`` and, if the
        inputs hold one, of the selection, all (B, T).
    """
    log_prob = inputs.log_prob
    tensors = [inputs.old_log_prob, inputs.advantages]
    if inputs.selection is not None:
        tensors.append(inputs.selection)
    current = log_prob.detach()
    current = current.to(torch.promote_types(current.dtype, torch.float32))
    width = inputs.response_mask.shape[-1]
    slope = torch.empty_like(current) if torch.is_grad_enabled() and log_prob.requires_grad else None
    sums = []
    with torch.no_grad():
        for block in _row_blocks(current):
            rows = Rows(inputs.response_mask[block], current.dtype)
            terms = fn(rows, current[block], *(tensor[block] for tensor in tensors))
            scale = row_weights(rows.counts, inputs.loss_agg_mode, width).to(current.dtype).unsqueeze(-1)
            if inputs.rollout_is_weights is not None:
                scale = scale * rows.inside(inputs.rollout_is_weights[block])
                total = (terms.loss * scale).sum()
            else:
                total = torch.dot(terms.loss.sum(-1), scale.squeeze(-1))
            statistics = (terms.kl, terms.clipped, terms.clipped_low)
            sums.append(torch.stack([total, *(torch.as_tensor(value).to(total) for value in statistics)]))
            if slope is not None:
                torch.mul(terms.slope(), scale, out=slope[block])
        loss, kl, clipped, clipped_low = torch.stack(sums).sum(0).unbind()
    if slope is not None:
        loss = _WithSlope.apply(log_prob, loss, slope)  # type: ignore[no-untyped-call]
    return PolicyLossSums(Sum(loss, agg_unit(inputs.loss_agg_mode)), clipped, kl, clipped_low)


def _row_blocks(tensor: Tensor) -> list[slice]:
    """Return the blocks of rows; a tensor without rows has one empty block."""
    elements = BLOCK_ELEMENTS.get(tensor.device.type, BLOCK_ELEMENTS_DEFAULT)
    rows = max(1, elements // max(1, tensor.shape[-1]))
    return [slice(at, at + rows) for at in range(0, max(1, tensor.shape[0]), rows)]


# Fields of the config


def clip_range(config: ActorLossConfig | None, name: str) -> tuple[float, float]:
    """Return how far the ratio may fall below 1 and rise above 1 before it is clipped.

    Raises: ValueError without a config.
    """
    config = need(config, name)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    high = config.clip_ratio if config.clip_ratio_high is None else config.clip_ratio_high
    return low, high


def need(config: ActorLossConfig | None, name: str) -> ActorLossConfig:
    """Return the config.

    Raises: ValueError if it is None.
    """
    if config is None:
        raise ValueError(f"policy loss {name!r} reads its parameters from the actor's config: pass config")
    return config


# Losses


class ClipRatioError(ValueError, AssertionError):
    """The constant of the dual clip is not above one."""


@_register_sums("vanilla")
def compute_policy_loss_vanilla(inputs: LossInputs) -> PolicyLossSums:
    """Clip the ratio of each token, and the loss of tokens with a negative advantage; see ``_vanilla``.

    Raises: ValueError, also an AssertionError, when ``clip_ratio_c`` is not above 1.
    """
    config = need(inputs.config, "vanilla")
    return _vanilla(inputs, *clip_range(config, "vanilla"), config.clip_ratio_c)


def _vanilla(inputs: LossInputs, low: float, high: float, dual: float) -> PolicyLossSums:
    """Sum the dual-clipped loss of each token, and count the tokens at the upper and at the lower clip.

    Plain form, with ratio = exp(log_prob - old_log_prob)::

        loss = maximum(-A * ratio, -A * ratio.clamp(1 - low, 1 + high))
        loss = where(A < 0, minimum(loss, -dual * A), loss)

    Source: PPO (arXiv:1707.06347), equation 7; dual clip, arXiv:1912.09729, section 4.
    """
    if not dual > 1.0:
        raise ClipRatioError(f"actor_rollout_ref.actor.clip_ratio_c must be above 1, got {dual}")

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        advantages = rows.inside(advantages)
        log_ratio = rows.inside(log_prob - old_log_prob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        kl = -log_ratio.sum()
        ratio = log_ratio.exp_()
        plain = advantages * ratio
        gain = plain.minimum(ratio.clamp_(1 - low, 1 + high).mul_(advantages))
        acted = plain.sub_(gain).sign_()  # 1 where the clip has lowered the gain
        bound = advantages.clamp_(max=0).mul_(dual)  # zero for positive advantages, whose gain is never below zero
        loss = bound.maximum(gain)
        acted_low = gain.sub_(loss).sign_().neg_()  # 1 where the bound has raised it
        loss.neg_()

        def slope() -> Tensor:
            # The loss is -advantage x ratio, or fixed.
            return torch.addcmul(loss, loss, acted.maximum(acted_low), value=-1)

        return TokenTerms(loss, slope, kl, clipped=acted.sum(), clipped_low=acted_low.sum())

    return token_loss(terms, inputs)


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
    inputs = LossInputs(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, None)
    return _means(_vanilla(inputs, low, high, clip_ratio_c), response_mask)


@_register_sums("gspo", only_mode="seq-mean-token-mean")
def compute_policy_loss_gspo(inputs: LossInputs) -> PolicyLossSums:
    """Clip the length-normalised ratio of the whole response; its gradient is spread over the tokens.

    Plain form, for each token of a response, ``sg`` being stop-gradient::

        mean = (log_prob - old_log_prob).sum() / length
        ratio = exp(log_prob - sg(log_prob) + sg(mean))
        loss = maximum(-A * ratio, -A * ratio.clamp(1 - low, 1 + high))

    Source: GSPO (arXiv:2507.18071), section 4.3 (GSPO-token).
    """
    low, high = clip_range(inputs.config, "gspo")

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        log_ratio = rows.inside(log_prob - old_log_prob)
        advantages = rows.inside(advantages)
        mean = log_ratio.sum(-1, keepdim=True) / rows.counts.clamp(min=1).unsqueeze(-1)
        ratio = mean.clamp(max=_MAX_SEQUENCE_LOG_RATIO).exp()  # (b, 1), shared by the tokens of a response
        bounded = ratio.clamp(1 - low, 1 + high)
        positive = advantages.clamp(min=0)
        negative = advantages.clamp_(max=0)
        low_ratio = ratio.minimum(bounded)
        high_ratio = ratio.maximum(bounded)
        too_high = ratio > low_ratio  # (b, 1), clips positive advantages
        too_low = ratio < high_ratio  # (b, 1), clips negative advantages
        clipped = positive.sign().sum(-1, keepdim=True) * too_high - negative.sign().sum(-1, keepdim=True) * too_low

        def slope() -> Tensor:
            moves = ratio * (mean <= _MAX_SEQUENCE_LOG_RATIO)
            return (positive * (-moves * ~too_high)).addcmul_(negative, -moves * ~too_low)

        loss = (positive * -low_ratio).addcmul_(negative, -high_ratio)
        return TokenTerms(loss, slope, -log_ratio.sum(), clipped.sum())

    return token_loss(terms, inputs)


@_register_sums("gpg")
def compute_policy_loss_gpg(inputs: LossInputs) -> PolicyLossSums:
    """Compute the plain policy gradient, without ratio or clip: ``loss = -A * log_prob``.

    Source: GPG (arXiv:2504.02546), section 3.
    """

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        slope = rows.inside(advantages).neg_()
        return TokenTerms(rows.inside(log_prob) * slope, lambda: slope)

    return token_loss(terms, inputs)


@_register_sums("geo_mean", only_mode="seq-mean-token-mean")
def compute_policy_loss_geo_mean(inputs: LossInputs) -> PolicyLossSums:
    """Weigh each response by the geometric mean of its token ratios, clipped token by token in the log domain.

    Plain form, for each response, with d = log_prob - old_log_prob::

        d = where(A > 0, d.clamp(max=high), d.clamp(min=-low))
        loss = -mean(A) * exp(mean(d))

    Source: GMPO (arXiv:2507.20673), section 3.
    """
    low, high = clip_range(inputs.config, "geo_mean")
    lengths = inputs.response_mask.sum(-1).clamp(min=1)
    keep = inputs.response_mask.bool()
    dtype = torch.promote_types(inputs.log_prob.dtype, torch.float32)
    log_ratio = torch.where(keep, (inputs.log_prob.to(dtype) - inputs.old_log_prob).to(dtype), 0.0)
    advantages = torch.where(keep, inputs.advantages.to(dtype), 0.0)
    clamped = log_ratio.clamp(-low, high)
    sign = advantages.sign()
    pessimistic = sign * (sign * log_ratio).minimum(sign * clamped)
    loss = -(advantages.sum(-1) / lengths) * (pessimistic.sum(-1) / lengths).clamp(max=MAX_LOG_RATIO).exp()
    if inputs.rollout_is_weights is not None:
        log_weights = torch.where(keep, (inputs.rollout_is_weights + 1e-10).log(), 0.0)
        loss = loss * (log_weights.sum(-1) / lengths).exp()
    acted = clamped != log_ratio
    return PolicyLossSums(
        loss=Sum(loss.sum(), "sequence"),
        clipped=(acted & (advantages > 0)).sum(dtype=loss.dtype),
        kl=-log_ratio.detach().sum(),
        clipped_low=(acted & (advantages < 0)).sum(dtype=loss.dtype),
    )


@_register_sums("cispo")
def compute_policy_loss_cispo(inputs: LossInputs) -> PolicyLossSums:
    """Weigh the policy gradient of each token by its clipped ratio, so that no token loses its gradient.

    Plain form: ``loss = -ratio.detach().clamp(1 - low, 1 + high) * A * log_prob``.

    Source: MiniMax-M1 (arXiv:2506.13585), section 3.1 (CISPO).
    """
    low, high = clip_range(inputs.config, "cispo")

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        log_ratio = rows.inside(log_prob - old_log_prob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        weight = ratio.clamp(1 - low, 1 + high)
        acted = weight != ratio
        slope = weight.mul_(rows.inside(advantages)).neg_()
        return TokenTerms(slope * rows.inside(log_prob), lambda: slope, -log_ratio.sum(), acted.count_nonzero())

    return token_loss(terms, inputs)


@_register_sums("sapo")
def compute_policy_loss_sapo(inputs: LossInputs) -> PolicyLossSums:
    """Let the gradient of a token fade as its ratio leaves 1, by a sigmoid with a temperature for each sign.

    Plain form: ``loss = -A * 4 / tau * sigmoid(tau * (ratio - 1))``, tau being ``tau_pos`` for positive advantages and
    ``tau_neg`` otherwise.

    Source: SAPO (arXiv:2511.20347), section 3, which aggregates by ``seq-mean-token-mean``.
    """
    options = need(inputs.config, "sapo").policy_loss

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor) -> TokenTerms:
        difference = rows.inside(log_prob - old_log_prob)
        advantages = rows.inside(advantages)
        ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp_()
        tau = (advantages > 0).to(ratio).mul_(options.tau_pos - options.tau_neg).add_(options.tau_neg)
        gate = ((ratio - 1) * tau).sigmoid_()
        loss = (gate * advantages).mul_(-4).div_(tau)
        return TokenTerms(loss, lambda: gate * (1 - gate) * ratio * advantages * -4, -difference.sum())

    return token_loss(terms, inputs)


# Losses that select tokens
#
# They treat the tokens of highest covariance of log-probability and advantage differently, to keep the entropy of the
# policy up: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models" (arXiv:2505.22617),
# section 4. The choice is made over a whole mini-batch: a worker calls the selector before the update and passes each
# micro-batch its part of ``selection`` (B, T). Without ``selection``, a loss selects over the tensors that it gets.


def token_keys(seeds: Tensor, width: int, draw: int = 0) -> Tensor:
    """Return a random number of 63 bits for each token, (B, width) int64.

    It depends only on the seed of the row, (B,) int64, on the number of the draw and on the token's place in the
    response.
    """
    columns = np.arange(1, width + 1, dtype=np.uint64)
    with np.errstate(over="ignore"):
        rows = mix(seeds.cpu().numpy().astype(np.uint64) + np.uint64(draw + 1) * MIX_FACTOR)
        keys = mix(rows[:, None] + columns * GOLDEN) & np.uint64((1 << 63) - 1)
    return torch.from_numpy(keys.astype(np.int64)).to(seeds.device)


def token_covariances(log_prob: Tensor, advantages: Tensor, response_mask: Tensor, across: Whole) -> tuple[Tensor, int]:
    """Return each token's contribution to the covariance of log-probability and advantage, and the number of tokens.

    Plain form: ``(A - mean(A)) * (log_prob - mean(log_prob))``, the means over all tokens inside the mask. The means
    are rounded to the tensors' precision, so that the order of the additions does not change them.

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
    """Return the ``count``-th smallest value of the candidates of all shards, the largest number if they are fewer."""
    info = torch.finfo(values.dtype) if values.is_floating_point() else torch.iinfo(values.dtype)
    smallest = torch.full((count,), info.max, dtype=values.dtype, device=values.device)
    pool = values[candidates]
    own = pool.topk(min(count, pool.numel()), largest=False).values
    smallest[: own.numel()] = own
    return across.gather(smallest).topk(count, largest=False).values.max()


def _first(keys: Tensor, candidates: Tensor, count: int, across: Whole) -> Tensor:
    """Choose the ``count`` candidates with the smallest keys; copies of a row are chosen together."""
    return candidates & (keys <= _threshold(keys, candidates, count, across))


def select_clip_cov(inputs: LossInputs, keys: Tensor, across: Whole) -> Tensor:
    """Choose at random among the tokens whose covariance lies between the bounds and whose ratio is not clipped.

    Returns: (B, T) bool. ``keys`` are the random numbers, so the choice depends on neither shards nor order.
    """
    low, high = clip_range(inputs.config, "clip_cov")
    options = need(inputs.config, "clip_cov").policy_loss
    share = 2e-4 if options.clip_cov_ratio is None else options.clip_cov_ratio
    lower = 1.0 if options.clip_cov_lb is None else options.clip_cov_lb
    upper = 5.0 if options.clip_cov_ub is None else options.clip_cov_ub
    covariance, tokens = _covariance(inputs, across)
    ratio = (inputs.log_prob.detach() - inputs.old_log_prob).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    # Which way an advantage of zero goes is irrelevant.
    clipped = torch.where(inputs.advantages > 0, ratio > 1 + high, ratio < 1 - low)
    candidates = inputs.response_mask.bool() & (covariance > lower) & (covariance < upper) & ~clipped
    return _first(keys, candidates, max(1, int(share * tokens)), across)


def select_kl_cov(inputs: LossInputs, keys: Tensor, across: Whole) -> Tensor:
    """Choose the tokens of highest covariance; among ties at the threshold, those with the smallest keys.

    Returns: (B, T) bool.
    """
    config = need(inputs.config, "kl_cov")
    share = 2e-4 if config.policy_loss.kl_cov_ratio is None else config.policy_loss.kl_cov_ratio
    covariance, tokens = _covariance(inputs, across)
    count = max(1, int(share * tokens))
    keep = inputs.response_mask.bool()
    threshold = _threshold(-covariance, keep, count, across)
    above = keep & (-covariance < threshold)
    tied = keep & (-covariance == threshold)
    rest = count - int(across.sum(above.sum().unsqueeze(0)).item())
    return above | _first(keys, tied, rest, across)


def _selected(inputs: LossInputs, selector: TokenSelector) -> LossInputs:
    """Return the inputs with a selection: the given one, or one over these tensors by torch's generator."""
    if inputs.selection is not None:
        return inputs
    mask = inputs.response_mask
    draw = int(torch.randint(1 << 31, ()).item())
    keys = token_keys(torch.arange(mask.shape[0], device=mask.device), mask.shape[1], draw)
    return dataclasses.replace(inputs, selection=selector(inputs, keys, Whole()))


@_register_sums("clip_cov", selector=select_clip_cov)
def compute_policy_loss_clip_cov(inputs: LossInputs) -> PolicyLossSums:
    """Clip the ratio of each token, and drop a few tokens of high covariance from the loss.

    Plain form: ``loss = where(selection, 0, maximum(-A * ratio, -A * ratio.clamp(1 - low, 1 + high)))``.

    Source: arXiv:2505.22617, section 4.3 (Clip-Cov).
    """
    low, high = clip_range(inputs.config, "clip_cov")

    def terms(rows: Rows, log_prob: Tensor, old_log_prob: Tensor, advantages: Tensor, selected: Tensor) -> TokenTerms:
        log_ratio = rows.inside(log_prob - old_log_prob).clamp_(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        advantages = rows.inside(advantages) * ~selected
        ratio = log_ratio.exp()
        plain = advantages * ratio
        clipped = advantages * ratio.clamp(1 - low, 1 + high)
        loss = -plain.minimum(clipped)
        chosen = rows.inside(selected.to(loss)).sum()
        return TokenTerms(loss, lambda: torch.where(plain <= clipped, loss, 0.0), -log_ratio.sum(), chosen)

    return token_loss(terms, _selected(inputs, select_clip_cov))


@_register_sums("kl_cov", selector=select_kl_cov)
def compute_policy_loss_kl_cov(inputs: LossInputs) -> PolicyLossSums:
    """Leave the ratio unclipped, and penalise |log_ratio| of a few tokens of the highest covariance.

    Plain form: ``loss = -A * ratio + where(selection, ppo_kl_coef * |log_prob - old_log_prob|, 0)``.

    Source: arXiv:2505.22617, section 4.3 (KL-Cov).

    Returns: as every loss; ``ppo_kl`` is the mean of |log_ratio|.
    """
    config = need(inputs.config, "kl_cov")
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

    return token_loss(terms, _selected(inputs, select_kl_cov))
