"""Advantages, KL control and off-policy correction."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.algos.names import IS_LEVELS, IS_MODES, KL_ESTIMATORS, REWEIGHT_METHODS
from verl.base_config import BaseConfig, Violation, setting


def rollout_is_rules(
    level: str, mode: str, upper: float | None, lower: float | None, veto: float | None
) -> Iterator[Violation]:
    """Reject unknown names in the keys ``rollout_is_*``, and limits with no value between them."""
    if level not in IS_LEVELS:
        yield Violation("rollout_is_level", level, f"must be one of {', '.join(IS_LEVELS)}")
    if mode not in IS_MODES:
        yield Violation("rollout_is_mode", mode, f"must be one of {', '.join(IS_MODES)}")
    if upper is not None and not 0 < upper < math.inf:
        yield Violation("rollout_is_threshold", upper, "must be above 0 and finite, or null")
    elif lower is not None and not 0 < lower < math.inf:
        yield Violation("rollout_is_threshold_lower", lower, "must be above 0 and finite, or null")
    elif upper is not None and lower is not None and lower > upper:
        yield Violation("rollout_is_threshold_lower", lower, f"must be at most rollout_is_threshold={upper}")
    elif upper is not None and lower is None and upper < 1:
        expected = "must be at least 1, since rollout_is_threshold_lower=null means its reciprocal; or set that key"
        yield Violation("rollout_is_threshold", upper, expected)
    if veto is not None and not 0 < veto < 1:
        yield Violation("rollout_is_veto_threshold", veto, "must be above 0 and below 1, or null")


@dataclass
class KLControlConfig(BaseConfig):
    """The coefficient of the KL penalty in the reward."""

    type: str = setting("fixed", "whether the weight follows target_kl", one_of=("fixed", "adaptive"))
    kl_coef: float = setting(0.001, "weight at the start")
    horizon: int = setting(10000, "sequences over which an adaptive weight reacts", above=0)
    target_kl: float = setting(0.1, "KL that an adaptive weight aims at")

    def rules(self) -> Iterator[Violation]:
        """Yield an adaptive controller without a target."""
        if self.target_kl <= 0 and self.type == "adaptive":
            yield Violation("target_kl", self.target_kl, "must be above 0 with type=adaptive")


@dataclass
class FilterGroupsConfig(BaseConfig):
    """Dynamic sampling: drop the prompts whose responses all have the same value of ``metric``.

    Source: DAPO (arXiv:2503.14476), section 3.2.
    """

    _is_closed = True

    enable: bool = setting(False, "drop such prompts and draw others")
    metric: str | None = setting(None, "acc, score, seq_reward, or another value that the scorer returns")
    max_num_gen_batches: int = setting(0, "most draws of one step; 0 or less: no limit")

    def rules(self) -> Iterator[Violation]:
        """Yield a filter without a metric."""
        if self.enable and not self.metric:
            expected = "is missing: write acc, score, seq_reward, or another value that the reward function returns"
            yield Violation("metric", self.metric, expected)


@dataclass
class AlgoConfig(BaseConfig):
    """The algorithm."""

    gamma: float = setting(1.0, "discount per token", at_least=0, at_most=1)
    lam: float = setting(1.0, "lambda of generalized advantage estimation", at_least=0, at_most=1)
    adv_estimator: str = setting("gae", "advantage estimator, built in or registered by the user")
    norm_adv_by_std_in_grpo: bool = setting(True, "GRPO divides scores by the standard deviation of their group")
    use_kl_in_reward: bool = setting(False, "subtract the KL to the reference policy from the reward")
    kl_penalty: str = setting("kl", "estimator of that KL")
    kl_ctrl: KLControlConfig = field(default_factory=KLControlConfig)
    use_pf_ppo: bool = setting(False, "resample the batch by score before the update")
    pf_ppo: dict[str, Any] = setting({"reweight_method": "pow", "weight_pow": 2.0}, "how scores become weights")
    filter_groups: FilterGroupsConfig | None = setting(None, "dynamic sampling; null: off")
    rollout_is_threshold: float | None = setting(None, "upper limit of importance weights; null: off")
    rollout_is_threshold_lower: float | None = setting(None, "lower limit; null: 1 / rollout_is_threshold")
    rollout_is_level: str = setting("token", "what one weight is computed over")
    rollout_is_mode: str = setting("truncate", "what happens to weights outside the limits")
    rollout_is_veto_threshold: float | None = setting(1e-4, "token ratio that drops its sequence; null: off")
    rollout_is: bool = setting(False, "multiply the loss by the weights; false only reports them")

    def rules(self) -> Iterator[Violation]:
        """Yield unknown names, and thresholds with no value between them."""
        if self.kl_penalty.removesuffix("+") not in KL_ESTIMATORS:
            expected = f"must be one of {', '.join(KL_ESTIMATORS)}, or one with a +"
            if self.kl_penalty.startswith("full"):
                expected = (
                    "needs the distributions of both policies in one worker, and the reward is shaped from sampled "
                    "log-probs: write actor_rollout_ref.actor.use_kl_loss=true with kl_loss_type=full instead; "
                    f"kl_penalty itself {expected}"
                )
            yield Violation("kl_penalty", self.kl_penalty, expected)
        yield from rollout_is_rules(
            self.rollout_is_level,
            self.rollout_is_mode,
            self.rollout_is_threshold,
            self.rollout_is_threshold_lower,
            self.rollout_is_veto_threshold,
        )
        if "reweight_method" in self.pf_ppo and self.pf_ppo["reweight_method"] not in REWEIGHT_METHODS:
            method = self.pf_ppo["reweight_method"]
            yield Violation("pf_ppo.reweight_method", method, f"must be one of {', '.join(REWEIGHT_METHODS)}")
