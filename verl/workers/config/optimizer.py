"""AdamW and its learning-rate schedule."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass

from verl.base_config import BaseConfig, Violation

SCHEDULES = ("constant", "cosine")


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
