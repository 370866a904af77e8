"""The configuration nodes that PRIME adds to the main trainer's; this module does not import torch."""

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from verl.algos.config import AlgoConfig, KLControlConfig
from verl.base_config import Idle, Violation, setting
from verl.utils.dataset.config import DataConfig
from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, HFModelConfig, RewardModelConfig
from verl.workers.config.actor_rollout_ref import FSDPRefConfig
from verl.workers.config.engine import STRATEGIES
from verl.workers.config.optimizer import CLIP_NOTHING
from verl.workers.config.reward_model import RewardModelModelConfig

LOSSES = ("ce", "dpo", "bon_acc", "bon_rm")
UPDATES = ("before", "after", "reverse", "none")
_MODEL = "reward_model.model"
_NO_KL = "PRIME has no KL term in the reward; for one in the loss write actor_rollout_ref.actor.use_kl_loss=true"
_OPTIM = ("lr", "lr_warmup_steps", "lr_warmup_steps_ratio", "weight_decay", "betas", "grad_clip", "lr_scheduler_type")


@dataclass
class PRIMEDataConfig(DataConfig):
    """Data of the run, and the filter that keeps one in ``oversample_factor`` drawn prompts."""

    _is_open = True
    _idle = (Idle("data.filter_accuracy", False, "data", ("accuracy_lower_bound", "accuracy_upper_bound")),)

    truncation: str = setting(
        "right", "treatment of prompts above the maximum length", one_of=("error", "left", "right", "middle")
    )
    filter_accuracy: bool = setting(True, "prefer prompts whose mean accuracy is between the bounds")
    accuracy_lower_bound: float = setting(
        0.2, "lower bound of the accuracy of a preferred prompt", at_least=0, at_most=1
    )
    accuracy_upper_bound: float = setting(
        0.8, "upper bound of the accuracy of a preferred prompt", at_least=0, at_most=1
    )
    oversample_factor: float = setting(4.0, "number of drawn prompts per trained prompt", at_least=1)
    filter_truncate: bool = setting(True, "prefer prompts without a truncated response")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["gen_batch_size"] = round(self.train_batch_size * self.oversample_factor)

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of ``DataConfig``; reject a fractional number of drawn prompts and bounds out of order."""
        yield from super().rules()
        drawn = self.train_batch_size * self.oversample_factor
        if drawn != round(drawn):
            expected = f"times data.train_batch_size={self.train_batch_size} must be an integer, it is {drawn:g}"
            yield Violation("oversample_factor", self.oversample_factor, expected)
        if self.gen_batch_size is not None and self.gen_batch_size != drawn:
            expected = "follows data.train_batch_size and data.oversample_factor: write null, and change that factor"
            yield Violation("gen_batch_size", self.gen_batch_size, expected)
        if self.accuracy_lower_bound > self.accuracy_upper_bound:
            expected = f"must be at most data.accuracy_upper_bound={self.accuracy_upper_bound:g}"
            yield Violation("accuracy_lower_bound", self.accuracy_lower_bound, expected)

    @property
    def prompts_per_step(self) -> int:
        """Number of prompts that a step trains on, after the filter."""
        return self.train_batch_size


@dataclass
class PRIMEKLControlConfig(KLControlConfig):
    """The KL penalty in the reward, which PRIME does not use: every key keeps its default."""

    kl_coef: float = setting(0.0, "initial weight")


@dataclass
class PRIMEAlgoConfig(AlgoConfig):
    """The weights of PRIME's two rewards: the outcome, and the token scores of the reward model.

    Source: PRIME (arXiv:2502.01456), equation 5.
    """

    _idle = (
        Idle("reward_model.enable", False, "algorithm", ("reward_dpo_coef",)),
        Idle("algorithm.use_kl_in_reward", True, "algorithm", ("use_kl_in_reward", "kl_penalty"), _NO_KL),
        Idle(
            "algorithm.use_kl_in_reward", True, "algorithm.kl_ctrl", ("type", "kl_coef", "horizon", "target_kl"), _NO_KL
        ),
    )

    adv_estimator: str = setting(
        "rloo", "advantage estimator of both rewards", one_of=("rloo",), hint="PRIME has no other"
    )
    kl_ctrl: PRIMEKLControlConfig = field(default_factory=PRIMEKLControlConfig)
    reward_gt_coef: float = setting(5.0, "weight of the outcome, the score of the reward function")
    reward_dpo_coef: float = setting(5.0, "weight of the reward model's token scores")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.__dict__["use_kl_in_reward"] = False


@dataclass
class PRIMEOptimizerConfig(FSDPOptimizerConfig):
    """AdamW of the reward model; the limit of the gradient norm is called ``grad_clip``."""

    lr: float = setting(1e-6, "learning rate after the warm-up", at_least=0, at_most=100)
    weight_decay: float = setting(0.0, "weight decay", at_least=0)
    grad_clip: float | None = setting(10.0, "maximum gradient norm", above=0, hint=CLIP_NOTHING)

    def __post_init__(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="optim.grad_clip is deprecated")  # PRIME has no other name for it
            super().__post_init__()


@dataclass
class PRIMEModelConfig(RewardModelModelConfig):
    """The trained reward model, a language model, and its frozen reference.

    Both score the policy's token ids, so they must have the policy's vocabulary.
    """

    ref_path: str | None = setting(None, "folder or hub id of the frozen reference")
    ref_type: str = setting(
        "freeze", "which model is the reference: freeze (the model at ref_path) or policy", one_of=("freeze", "policy")
    )
    update: str = setting("before", "order of the reward model's update and its scoring", one_of=UPDATES)
    beta_train: float = setting(0.05, "scale: a token's reward is this times its log-ratio to the reference", above=0)
    loss_type: str = setting("ce", "loss of the reward model", one_of=LOSSES)
    tokenizer_path: str | None = setting(None, "folder or hub id of the policy's tokenizer; null means path")
    enable_gradient_checkpointing: bool = setting(True, "recompute activations in the backward pass")
    fused_kernel_options: dict[str, Any] = setting({"impl_backend": "torch"}, "implementation of the fused head")
    optim: PRIMEOptimizerConfig = field(default_factory=PRIMEOptimizerConfig)

    @property
    def optimizer(self) -> PRIMEOptimizerConfig:
        """The optimizer of the reward model."""
        return self.optim

    def rules(self) -> Iterator[Violation]:
        """Yield a tokenizer other than the policy's, and a frozen reference without a path."""
        if self.input_tokenizer is not None:
            expected = "must be null: PRIME compares reward model and policy token by token, so they share a tokenizer"
            yield Violation("input_tokenizer", self.input_tokenizer, expected)
        if self.ref_type == "freeze" and self.ref_path is None:
            yield Violation("ref_path", None, "is missing: name the model of the reference, or write ref_type=policy")

    @property
    def paths(self) -> dict[str, str]:
        """The configuration keys of the models to load, with their paths."""
        frozen = {"ref_path": self.ref_path} if self.ref_type == "freeze" and self.ref_path else {}
        return super().paths | frozen

    def as_model_config(self) -> HFModelConfig:
        """Return the node from which the engine builds the trained model."""
        shared = ("path", "tokenizer_path", "external_lib", "trust_remote_code", "use_shm", "use_remove_padding")
        own = ("use_prefix_sharing", "enable_gradient_checkpointing", "use_fused_kernels", "fused_kernel_options")
        return HFModelConfig(**{name: self[name] for name in shared + own})


@dataclass
class PRIMERewardModelConfig(RewardModelConfig):
    """An implicit process reward model, which is trained on outcomes and scores tokens."""

    _is_open = True
    _idle = (Idle(f"{_MODEL}.update", "none", _MODEL, ("loss_type", *(f"optim.{name}" for name in _OPTIM))),)

    strategy: str = setting("fsdp", "engine of the reward model", one_of=STRATEGIES)
    model: PRIMEModelConfig = field(default_factory=PRIMEModelConfig)
    prime_granularity: str = setting(
        "token", "unit that gets a score: token or whole response", one_of=("token", "whole")
    )
    prime_norm: str = setting("batch_norm", "normalization of the scores", one_of=("batch_norm", "none"))
    mini_batch_size: int = setting(256, "number of prompts per optimizer step", at_least=1)
    rollout_n: int = setting(1, "number of responses per prompt", at_least=1)
    reward_manager: str = setting("prime", "reward manager, which turns responses into scores", empty=False)

    @property
    def is_classifier(self) -> bool:
        """Whether the model has a classification head with one label; PRIME's is a language model."""
        return False

    def rules(self) -> Iterator[Violation]:
        """Apply the rules of ``RewardModelConfig``; reject a generative judge and an overlong penalty."""
        yield from super().rules()
        if self.is_generative:
            yield Violation("model_type", self.model_type, "must be discriminative: PRIME trains a language model")
        written = self.reward_kwargs.get("overlong_buffer_cfg")
        for key, buffer in (("overlong_buffer", self.overlong_buffer), ("reward_kwargs.overlong_buffer_cfg", written)):
            if isinstance(buffer, Mapping) and buffer.get("enable") and buffer.get("penalty_factor"):
                expected = "is not read: PRIME takes the outcome without the penalty. Write false, or penalty_factor=0"
                yield Violation(f"{key}.enable", True, expected)
        if self.max_length is not None:
            yield Violation("max_length", self.max_length, "must be null: PRIME scores each token of the policy")

    def as_trained(self) -> FSDPActorConfig:
        """Return the engine's node for the trained model, which cuts batches as the actor does."""
        return FSDPActorConfig(
            strategy=self.strategy,
            ppo_mini_batch_size=self.mini_batch_size,
            ppo_micro_batch_size=self.micro_batch_size,
            ppo_micro_batch_size_per_gpu=self.micro_batch_size_per_gpu,
            use_dynamic_bsz=self.use_dynamic_bsz,
            ppo_max_token_len_per_gpu=self.forward_max_token_len_per_gpu,
            ulysses_sequence_parallel_size=self.ulysses_sequence_parallel_size,
            optim=self.model.optim,
            fsdp_config=self.model.fsdp_config,
        )

    def as_reference(self) -> FSDPRefConfig:
        """Return the engine's node for the frozen reference."""
        return FSDPRefConfig(
            strategy=self.strategy,
            ulysses_sequence_parallel_size=self.ulysses_sequence_parallel_size,
            fsdp_config=self.model.fsdp_config,
        )
