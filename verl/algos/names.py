"""Names of the algorithms, for the registries and for the checks of the launching process: this imports no torch."""

from enum import StrEnum
from typing import Literal


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


ADV_ESTIMATORS = tuple(name.value for name in AdvantageEstimator)
POLICY_LOSSES = ("vanilla", "gspo", "gpg", "geo_mean", "clip_cov", "kl_cov", "cispo", "sapo")
POLICY_LOSS_ALIASES = {"clip-cov": "clip_cov", "kl-cov": "kl_cov"}
Unit = Literal["token", "sequence", "constant", "micro_batch"]
BY_LENGTH = "seq-mean-token-sum-norm"
"""The mode of loss aggregation that divides the sum of each sequence by a constant length."""
LOSS_AGG_UNIT: dict[str, Unit] = {
    "token-mean": "token",
    "seq-mean-token-sum": "sequence",
    "seq-mean-token-mean": "sequence",
    BY_LENGTH: "sequence",
}
"""The modes of loss aggregation, each with the unit whose count in the mini-batch divides the loss."""
LOSS_AGG_MODES = tuple(LOSS_AGG_UNIT)
KL_ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
"""Estimators of the KL from sampled log-probs; each also with a ``+`` for the gradient of k2."""
FULL_KL = "full"
"""The KL over the whole vocabulary, which only the loss of the actor can compute."""
IS_LEVELS = ("token", "sequence", "geometric")
IS_MODES = ("truncate", "mask", "clip")
REWEIGHT_METHODS = ("pow", "max_min", "max_random")
