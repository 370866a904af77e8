"""The registry of policy losses, their signature, and what several of them share."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from torch import Tensor

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
    @property
    def policy_loss(self) -> Any: ...


class PolicyLossFn(Protocol):
    """The signature of a registered loss; one that was registered with a selector takes ``selection`` (B, T) too."""

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


class Whole:
    """The tensors given are all there is; a subclass for shards of a mini-batch reaches the others."""

    def sum(self, values: Tensor) -> Tensor:
        """Add up (n,) values over the shards."""
        return values

    def gather(self, values: Tensor) -> Tensor:
        """Join the (n,) values of the shards, equally many each."""
        return values


class TokenSelector(Protocol):
    """Chooses tokens over a whole mini-batch, of which the tensors (B, T) are this rank's rows.

    ``keys`` (B, T) are random numbers of the tokens that do not depend on who holds them.
    """

    def __call__(
        self,
        old_log_prob: Tensor,
        log_prob: Tensor,
        advantages: Tensor,
        response_mask: Tensor,
        config: PolicyLossConfig,
        keys: Tensor,
        across: Whole,
    ) -> Tensor: ...


@dataclass(frozen=True)
class _Entry:
    """What is registered beside a loss."""

    fn: Any
    loss_agg_mode: str | None = None
    selector: TokenSelector | None = None


_Fn = TypeVar("_Fn", bound=PolicyLossFn)

POLICY_LOSS_REGISTRY: dict[str, PolicyLossFn] = {}
_ENTRIES: dict[str, _Entry] = {}


def register_policy_loss(
    name: str, loss_agg_mode: str | None = None, selector: TokenSelector | None = None
) -> Callable[[_Fn], _Fn]:
    """Enter the decorated loss under a name for ``actor.policy_loss.loss_mode``; the last one entered wins.

    ``loss_agg_mode`` is given by a loss that aggregates in one way only, ``selector`` by one that treats some tokens
    differently and chooses them over the whole mini-batch. A loss aggregates by ``agg_loss`` without a length: the
    workers put the configured one in the place of the width.
    """

    def enter(fn: _Fn) -> _Fn:
        POLICY_LOSS_REGISTRY[name] = fn
        _ENTRIES[name] = _Entry(fn, loss_agg_mode, selector)
        return fn

    return enter


def _entry(name: str) -> _Entry:
    """Return what stands beside a loss; nothing where it was put into the registry by hand."""
    entry = _ENTRIES.get(name, _Entry(None))
    return entry if entry.fn is POLICY_LOSS_REGISTRY.get(name) else _Entry(None)


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
    return _entry(name).loss_agg_mode or loss_agg_mode


def get_token_selector(name: str) -> TokenSelector | None:
    """Return how the named loss chooses tokens over a whole mini-batch; None where it treats all alike."""
    return _entry(name).selector


# What losses read of the config


def clip_range(config: PolicyLossConfig | None, name: str) -> tuple[float, float]:
    """Return how far the ratio may fall and rise before it is clipped.

    Raises: ValueError without a config.
    """
    config = need(config, name)
    low, high = config.clip_ratio_low, config.clip_ratio_high
    return (config.clip_ratio if low is None else low), (config.clip_ratio if high is None else high)


def need(config: PolicyLossConfig | None, name: str) -> PolicyLossConfig:
    """Return the config.

    Raises: ValueError where there is none.
    """
    if config is None:
        raise ValueError(f"policy loss {name!r} reads its parameters from the actor's config: pass config")
    return config
