"""AdamW and its learning-rate schedule."""

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Self

from verl.base_config import BaseConfig, Violation, setting

SCHEDULES = ("constant", "cosine")
DECAY_STYLES = ("constant", "linear", "cosine", "inverse_square_root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")
MOST_RATE = 100
CLIP_NOTHING = "write a large number to clip nothing"


@dataclass
class OptimizerConfig(BaseConfig):
    """AdamW, shared by every engine."""

    _mutable_fields = frozenset({"clip_grad", "total_training_steps", "lr_warmup_steps"})

    lr: float = setting(1e-3, "learning rate after the warm-up", at_least=0, at_most=MOST_RATE)
    lr_warmup_steps_ratio: float = setting(0.0, "share of the steps that warm up", at_least=0, at_most=1)
    total_training_steps: int | None = setting(-1, "length of the schedule; the trainer sets it")
    weight_decay: float = setting(0.01, "decay of the weights per step, times lr", at_least=0)
    lr_warmup_steps: int | None = setting(-1, "steps that warm up; 0 or less: by the ratio")
    betas: tuple[float, float] = setting((0.9, 0.999), "decay of the moments of the gradient")
    clip_grad: float = setting(1.0, "limit of the gradient norm", above=0, hint=CLIP_NOTHING)
    use_checkpoint_opt_param_scheduler: bool = setting(False, "a resumed run keeps the settings of its checkpoint")
    grad_clip: float | None = setting(None, "deprecated: clip_grad", above=0, hint=CLIP_NOTHING)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grad_clip is not None:
            warnings.warn("optim.grad_clip is deprecated: write optim.clip_grad", DeprecationWarning, stacklevel=2)
            self.clip_grad = self.grad_clip

    def rules(self) -> Iterator[Violation]:
        """Yield decays outside their range."""
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            yield Violation("betas", self.betas, "must be two numbers in [0, 1)")

    def limited(self, grad_clip: float) -> Self:
        """Return the optimizer with the role's gradient-norm limit ``grad_clip``; 1.0 keeps ``clip_grad``."""
        return dataclasses.replace(self, clip_grad=grad_clip if grad_clip != 1.0 else self.clip_grad, grad_clip=None)


@dataclass
class FSDPOptimizerConfig(OptimizerConfig):
    """The schedule of the FSDP engine."""

    _mutable_fields = OptimizerConfig._mutable_fields | {"lr_scheduler_type"}

    min_lr_ratio: float | None = setting(0.0, "last learning rate, as a share of lr", at_least=0, at_most=1)
    num_cycles: float = setting(0.5, "waves of the cosine; 0.5 falls once", above=0)
    lr_scheduler_type: str = setting("constant", "schedule after the warm-up", one_of=SCHEDULES)
    warmup_style: str | None = setting(
        None, "deprecated: lr_scheduler_type", one_of=SCHEDULES, hint="write lr_scheduler_type instead"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_style is not None:
            warnings.warn(
                "optim.warmup_style is deprecated: write optim.lr_scheduler_type", DeprecationWarning, stacklevel=2
            )
            self.lr_scheduler_type = self.warmup_style


@dataclass
class McoreOptimizerConfig(OptimizerConfig):
    """The optimizer and schedule of the Megatron-Core engine."""

    optimizer: str = setting("adam", "AdamW")
    lr_warmup_init: float = setting(0.0, "learning rate before the warm-up", at_least=0, at_most=MOST_RATE)
    lr_decay_steps: int | None = setting(None, "steps until min_lr; null: all", at_least=1)
    lr_decay_style: str = setting("constant", "schedule after the warm-up", one_of=DECAY_STYLES)
    min_lr: float = setting(0.0, "last learning rate", at_least=0, at_most=MOST_RATE)
    weight_decay_incr_style: str = setting("constant", "schedule of weight_decay", one_of=WEIGHT_DECAY_STYLES)
    lr_wsd_decay_style: str = setting("exponential", "decay at the end of WSD", one_of=WSD_STYLES)
    lr_wsd_decay_steps: int | None = setting(None, "steps of that decay", at_least=1)
    override_optimizer_config: dict[str, Any] = setting({}, "fields of OptimizerConfig to set")

    def rules(self) -> Iterator[Violation]:
        """Yield other optimizers, and learning rates and steps that do not fit each other."""
        yield from super().rules()
        if self.optimizer != "adam":
            yield Violation.unsupported("optimizer", self.optimizer, "is not supported: write adam")
        for key in ("min_lr", "lr_warmup_init"):
            if not 0 <= self[key] <= self.lr:
                yield Violation(key, self[key], f"must be from 0 to lr, which is {self.lr}")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_steps is None:
            yield Violation("lr_wsd_decay_steps", None, "must be given with lr_decay_style=WSD")
