"""The configuration nodes that SPPO adds to the main trainer's; this module does not import torch."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from verl.algos.config import AlgoConfig
from verl.base_config import Idle, Violation, as_yaml, setting
from verl.trainer.config.rules.no_effect import OPTIONS_OF_LOSSES
from verl.workers.config import FSDPActorConfig, PolicyLossConfig

_LOSS = "actor_rollout_ref.actor.policy_loss"
_CLIP = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c")


@dataclass
class SPPOPolicyLossConfig(PolicyLossConfig):
    """Selects the loss of SPPO, which ``recipe.sppo.dp_actor`` registers."""

    loss_mode: str = setting("sppo", "name of the loss", one_of=("sppo",))


@dataclass
class SPPOActorConfig(FSDPActorConfig):
    """A policy whose log-ratio is fitted to the reward, without clipping.

    Source: SPPO (arXiv:2405.00675), equation 4.4.
    """

    _idle = (Idle(f"{_LOSS}.loss_mode", "sppo", _LOSS, OPTIONS_OF_LOSSES),)

    sppo_eta: float = setting(1.0, "scale of the reward in the loss", above=0)
    policy_loss: SPPOPolicyLossConfig = field(default_factory=SPPOPolicyLossConfig)

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of an actor; reject a clip range, and an aggregation over tokens: SPPO's loss has none."""
        yield from super().rules()
        for name in _CLIP:
            default = FSDPActorConfig.__dataclass_fields__[name].default
            if self[name] != default:
                yield Violation(name, self[name], f"is not read: SPPO does not clip. Write {as_yaml(default)}")
        if self.loss_agg_mode != "token-mean":
            yield Violation("loss_agg_mode", self.loss_agg_mode, "must be token-mean: SPPO has no other")


@dataclass
class SPPOAlgoConfig(AlgoConfig):
    """Algorithm keys of SPPO, which compares a reward with the batch's soft mean instead of estimating advantages."""

    adv_estimator: str | None = setting(None, "null: SPPO has its own advantages")
    sppo_eta: float = setting(1.0, "inverse temperature of the soft mean; a larger one favours high rewards", above=0)

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of ``AlgoConfig``; reject an advantage estimator, and importance weights of tokens."""
        yield from super().rules()
        if self.adv_estimator is not None:
            expected = "must be null: SPPO compares rewards with their soft mean"
            yield Violation("adv_estimator", self.adv_estimator, expected)
        if self.rollout_is:
            yield Violation("rollout_is", True, "is not supported: SPPO's loss is not a sum over tokens. Write false")
