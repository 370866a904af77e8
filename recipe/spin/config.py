"""The configuration nodes that SPIN adds to the main trainer's; this module does not import torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from verl.algos.config import AlgoConfig
from verl.base_config import Violation, as_yaml, setting
from verl.trainer.config.run_config import TrainerConfig
from verl.workers.config import FSDPActorConfig

_OF_PPO = ("clip_ratio", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c", "entropy_coeff", "use_kl_loss")
_OF_PPO += ("loss_agg_mode", "use_rollout_log_probs")


@dataclass
class SPINActorConfig(FSDPActorConfig):
    """Configuration of a policy that is trained on pairs of its own responses.

    Source: DPO (arXiv:2305.18290), equation 7, with label smoothing as in conservative DPO; IPO (arXiv:2310.12036),
    equation 17.
    """

    dpo_beta: float = setting(0.1, "scale of the log-ratio to the reference", above=0)
    dpo_loss_type: str = setting("sigmoid", "loss of a pair", one_of=("sigmoid", "ipo"))
    dpo_label_smoothing: float = setting(0.0, "assumed share of wrong preferences", at_least=0, below=0.5)

    @property
    def needs_reference(self) -> bool:
        """Whether the update reads a reference policy: always, since the loss compares with its log-probabilities."""
        return True

    @property
    def holds_reference(self) -> bool:
        """Whether the actor's workers hold the reference: always, since it copies the actor's weights."""
        return True

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of an actor; reject keys of PPO's loss, and settings that separate a pair of responses."""
        yield from super().rules()
        defaults = {name: FSDPActorConfig.__dataclass_fields__[name].default for name in _OF_PPO}
        for name, default in defaults.items():
            if self[name] != default:
                yield Violation(name, self[name], f"is not read: SPIN has its own loss. Write {as_yaml(default)}")
        if self.shuffle:
            yield Violation("shuffle", True, "must be false: SPIN keeps the responses of a pair together")
        if self.policy_loss["loss_mode"] != "vanilla":
            expected = "is not read: write vanilla, and choose dpo_loss_type"
            yield Violation("policy_loss.loss_mode", self.policy_loss["loss_mode"], expected)
        if self.dpo_label_smoothing and self.dpo_loss_type != "sigmoid":
            yield Violation("dpo_label_smoothing", self.dpo_label_smoothing, "needs dpo_loss_type=sigmoid: write 0")


@dataclass
class SPINAlgoConfig(AlgoConfig):
    """Algorithm keys of SPIN, which learns from preferences instead of advantages."""

    adv_estimator: str | None = setting(None, "null: SPIN has no advantages")

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of ``AlgoConfig``; reject an estimator and a penalty in the reward."""
        yield from super().rules()
        if self.adv_estimator is not None:
            yield Violation("adv_estimator", self.adv_estimator, "must be null: SPIN has preferences, not advantages")
        if self.use_kl_in_reward:
            expected = "is not read: the loss of SPIN holds the policy near its reference. Write false"
            yield Violation("use_kl_in_reward", True, expected)
        if self.rollout_is:
            yield Violation(
                "rollout_is", True, "is not read: the loss of a pair has no importance weights. Write false"
            )
        if self.rollout_is_threshold is not None:
            expected = "is not read: the loss of a pair has no importance weights. Write null"
            yield Violation("rollout_is_threshold", self.rollout_is_threshold, expected)


@dataclass
class SPINTrainerConfig(TrainerConfig):
    """Trainer keys of SPIN: those of the main trainer, and how often the reference is updated."""

    _is_open = True

    balance_batch: bool = setting(
        False,
        "balance the tokens of the workers by reordering rows",
        one_of=(False,),
        hint="SPIN keeps the responses of a pair together",
    )
    critic_warmup: int = setting(
        0, "number of steps before the first actor update", one_of=(0,), hint="SPIN has no critic to wait for"
    )
    ref_update_freq: int = setting(
        1, "steps after which the reference takes the policy's weights; 0: never", at_least=0
    )
