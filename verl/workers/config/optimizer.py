"""AdamW and its learning-rate schedule."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from verl.base_config import BaseConfig, Violation

SCHEDULES = ("constant", "cosine")
DECAY_STYLES = ("constant", "linear", "cosine", "inverse_square_root", "WSD")
WSD_STYLES = ("linear", "cosine", "exponential", "minus_sqrt")
WEIGHT_DECAY_STYLES = ("constant", "linear", "cosine")


@dataclass
class OptimizerConfig(BaseConfig):
    """AdamW, shared by every engine."""

    _mutable_fields = frozenset({"clip_grad", "total_training_steps", "lr_warmup_steps"})

    lr: float = 1e-3
    lr_warmup_steps_ratio: float = 0.0
    total_training_steps: int | None = -1
    weight_decay: float = 0.01
    lr_warmup_steps: int | None = -1
    betas: tuple[float, float] = (0.9, 0.999)
    clip_grad: float = 1.0
    grad_clip: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.grad_clip is not None:
            warnings.warn("optim.grad_clip is deprecated: write optim.clip_grad", DeprecationWarning, stacklevel=2)
            self.clip_grad = self.grad_clip

    def rules(self) -> Iterator[Violation]:
        """Yield values outside their range."""
        if self.lr < 0:
            yield Violation("lr", self.lr, "must be 0 or more")
        if not 0 <= self.lr_warmup_steps_ratio <= 1:
            yield Violation("lr_warmup_steps_ratio", self.lr_warmup_steps_ratio, "must be in [0, 1]")
        if self.weight_decay < 0:
            yield Violation("weight_decay", self.weight_decay, "must be 0 or more")
        if len(self.betas) != 2 or not all(0 <= beta < 1 for beta in self.betas):
            yield Violation("betas", self.betas, "must be two numbers in [0, 1)")
        for key in ("clip_grad", "grad_clip"):
            value = getattr(self, key)
            if value is not None and value <= 0:
                yield Violation(key, value, "must be above 0; write a large number to clip nothing")


@dataclass
class FSDPOptimizerConfig(OptimizerConfig):
    """The schedule of the FSDP engine."""

    _mutable_fields = OptimizerConfig._mutable_fields | {"lr_scheduler_type"}

    min_lr_ratio: float | None = 0.0
    num_cycles: float = 0.5
    lr_scheduler_type: str = "constant"
    warmup_style: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.warmup_style is not None:
            warnings.warn(
                "optim.warmup_style is deprecated: write optim.lr_scheduler_type", DeprecationWarning, stacklevel=2
            )
            self.lr_scheduler_type = self.warmup_style

    def rules(self) -> Iterator[Violation]:
        """Yield unknown schedules and values outside their range."""
        yield from super().rules()
        if self.lr_scheduler_type not in SCHEDULES:
            yield Violation("lr_scheduler_type", self.lr_scheduler_type, f"must be one of {', '.join(SCHEDULES)}")
        if self.warmup_style not in (None, *SCHEDULES):
            yield Violation(
                "warmup_style",
                self.warmup_style,
                f"must be null: write lr_scheduler_type, one of {', '.join(SCHEDULES)}",
            )
        if self.min_lr_ratio is not None and not 0 <= self.min_lr_ratio <= 1:
            yield Violation("min_lr_ratio", self.min_lr_ratio, "must be in [0, 1]")
        if self.num_cycles <= 0:
            yield Violation("num_cycles", self.num_cycles, "must be above 0")


@dataclass
class McoreOptimizerConfig(OptimizerConfig):
    """The optimizer and schedule of the Megatron-Core engine."""

    optimizer: str = "adam"
    lr_warmup_init: float = 0.0
    lr_decay_steps: int | None = None
    lr_decay_style: str = "constant"
    min_lr: float = 0.0
    weight_decay_incr_style: str = "constant"
    lr_wsd_decay_style: str = "exponential"
    lr_wsd_decay_steps: int | None = None
    use_checkpoint_opt_param_scheduler: bool = False
    override_optimizer_config: dict[str, Any] = field(default_factory=dict)

    def rules(self) -> Iterator[Violation]:
        """Yield unknown styles and values outside their range."""
        yield from super().rules()
        if self.optimizer != "adam":
            yield Violation.unsupported("optimizer", self.optimizer, "is not supported: write adam")
        for key, styles in (
            ("lr_decay_style", DECAY_STYLES),
            ("lr_wsd_decay_style", WSD_STYLES),
            ("weight_decay_incr_style", WEIGHT_DECAY_STYLES),
        ):
            if getattr(self, key) not in styles:
                yield Violation(key, getattr(self, key), f"must be one of {', '.join(styles)}")
        for key in ("min_lr", "lr_warmup_init"):
            if not 0 <= getattr(self, key) <= self.lr:
                yield Violation(key, getattr(self, key), f"must be from 0 to lr, which is {self.lr}")
        for key in ("lr_decay_steps", "lr_wsd_decay_steps"):
            if (steps := getattr(self, key)) is not None and steps < 1:
                yield Violation(key, steps, "must be 1 or more, or null")
        if self.lr_decay_style == "WSD" and self.lr_wsd_decay_steps is None:
            yield Violation("lr_wsd_decay_steps", None, "must be given with lr_decay_style=WSD")
