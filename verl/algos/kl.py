"""KL divergence from the reference: estimators per token, and controllers of their weight."""

from torch import Tensor

from verl.algos.config import KLControlConfig
from verl.algos.names import KL_ESTIMATORS
from verl.errors import UnsupportedInput, WrongSetting

_MAX_LOG_RATIO = 20.0
_MAX_K3 = 10.0


def check_kl_penalty(kl_penalty: str) -> str:
    """Return the name when it is an estimator, with or without the suffix ``+``.

    Raises: UnsupportedInput, a ValueError and a NotImplementedError, otherwise.
    """
    if kl_penalty.removesuffix("+") in KL_ESTIMATORS:
        return kl_penalty
    known = ", ".join(KL_ESTIMATORS)
    if kl_penalty.removesuffix("+") == "full":
        raise UnsupportedInput(
            f"KL estimator {kl_penalty!r} needs the distributions of both policies, not log-probabilities of tokens: "
            f"write actor_rollout_ref.actor.kl_loss_type=full with use_kl_loss=true, or use one of {known}"
        )
    raise UnsupportedInput(f"KL estimator must be one of {known}, each also with the suffix '+', got {kl_penalty!r}")


def kl_penalty_forward(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate the divergence from the reference at each sampled token; with d = logprob - ref_logprob:

    ``kl`` or ``k1`` is d, ``abs`` is |d|, ``mse`` or ``k2`` is d^2 / 2, ``low_var_kl`` or ``k3`` is exp(-d) + d - 1.

    Source: J. Schulman, "Approximating KL divergence" (2020): k1, k2 and k3.

    Raises: UnsupportedInput for an unknown estimator.
    """
    check_kl_penalty(kl_penalty)
    log_ratio = logprob - ref_logprob
    if kl_penalty in ("kl", "k1"):
        return log_ratio
    if kl_penalty == "abs":
        return log_ratio.abs()
    if kl_penalty in ("mse", "k2"):
        return 0.5 * log_ratio.square()
    if kl_penalty in ("low_var_kl", "k3"):
        inverse = (-log_ratio).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        return (inverse.exp() - inverse - 1).clamp(-_MAX_K3, _MAX_K3)
    raise UnsupportedInput(f"kl_penalty_forward does not support {kl_penalty!r}: call kl_penalty")


def kl_penalty(logprob: Tensor, ref_logprob: Tensor, kl_penalty: str) -> Tensor:
    """Estimate the divergence at each token; a name with ``+`` has the gradient of k2.

    Only the gradient of k2 is an unbiased estimate of the gradient of the divergence. So ``k3+`` has the value of k3
    and the gradient of k2 (straight-through): ``k2 - k2.detach() + k3.detach()``.

    Raises: UnsupportedInput for an unknown estimator.
    """
    check_kl_penalty(kl_penalty)
    if not kl_penalty.endswith("+"):
        return kl_penalty_forward(logprob, ref_logprob, kl_penalty)
    value = kl_penalty_forward(logprob, ref_logprob, kl_penalty.removesuffix("+")).detach()
    gradient = 0.5 * (logprob - ref_logprob).square()
    return gradient - gradient.detach() + value


def compute_rewards(token_level_scores: Tensor, old_log_prob: Tensor, ref_log_prob: Tensor, kl_ratio: float) -> Tensor:
    """Subtract ``kl_ratio`` times the log-ratio to the reference from the scores, all (B, T)."""
    return token_level_scores - kl_ratio * (old_log_prob - ref_log_prob)


class FixedKLController:
    """A constant weight."""

    def __init__(self, kl_coef: float) -> None:
        self.value = float(kl_coef)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Keep the weight."""

    def state_dict(self) -> dict[str, float]:
        """Return an empty state, since a fixed weight comes from the config."""
        return {}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Accept any state."""


class AdaptiveKLController:
    """A weight that follows a target divergence.

    Source: Ziegler et al. (arXiv:1909.08593), section 2.2.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        self.value = float(init_kl_coef)
        self.target = float(target_kl)
        self.horizon = float(horizon)

    def update(self, current_kl: float, n_steps: int) -> None:
        """Multiply the weight by ``1 + clip(current_kl / target - 1, -0.2, 0.2) * n_steps / horizon``.

        ``n_steps`` is the number of sequences since the last update.
        """
        error = min(max(current_kl / self.target - 1.0, -0.2), 0.2)
        self.value *= 1.0 + error * n_steps / self.horizon

    def state_dict(self) -> dict[str, float]:
        """Return the weight, which a resumed run continues with."""
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Restore the weight of a saved run."""
        self.value = float(state.get("value", self.value))


KLController = FixedKLController | AdaptiveKLController
"""The weight of the KL term and its updates."""


def get_kl_controller(kl_ctrl: KLControlConfig) -> KLController:
    """Build the controller that ``algorithm.kl_ctrl`` describes.

    Raises: ValueError for an unknown type, or a horizon or target that is not positive.
    """
    if kl_ctrl.type == "fixed":
        return FixedKLController(kl_ctrl.kl_coef)
    if kl_ctrl.type == "adaptive":
        for key in ("horizon", "target_kl"):
            if not getattr(kl_ctrl, key) > 0:
                raise WrongSetting(f"algorithm.kl_ctrl.{key} must be positive, got {getattr(kl_ctrl, key)}")
        return AdaptiveKLController(kl_ctrl.kl_coef, kl_ctrl.target_kl, kl_ctrl.horizon)
    raise UnsupportedInput(f"algorithm.kl_ctrl.type must be 'fixed' or 'adaptive', got {kl_ctrl.type!r}")
