"""Learning rate schedules: factors of the base learning rate."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

Factor = Callable[[int], float]


def num_warmup_steps(steps: int | None, ratio: float, total: int) -> int:
    """Return ``lr_warmup_steps``, or ``lr_warmup_steps_ratio`` of the total if that is null, 0 or negative.

    Raises: ValueError when the ratio needs a total that was not given.
    """
    if steps is not None and steps > 0:
        return steps
    if ratio > 0 and total <= 0:
        raise ValueError(f"optim.lr_warmup_steps_ratio > 0 needs optim.total_training_steps > 0, got {total}")
    return int(ratio * max(total, 0))


def _warmed_up(num_warmup_steps: int, after: Factor, start: float = 0.0) -> Factor:
    """Rise linearly from ``start`` to 1, then follow ``after(step)``."""

    def factor(step: int) -> float:
        if step < num_warmup_steps:
            return start + (1.0 - start) * step / max(1, num_warmup_steps)
        return after(step)

    return factor


def _cosine(num_warmup_steps: int, num_training_steps: int, min_lr_ratio: float, num_cycles: float) -> Factor:
    """Return the factor of a schedule that falls along a cosine to ``min_lr_ratio`` after the warm-up."""

    def factor(step: int) -> float:
        progress = (step - num_warmup_steps) / max(1, num_training_steps - num_warmup_steps)
        wave = math.cos(math.pi * num_cycles * 2.0 * progress)
        return max(min_lr_ratio, 0.5 * (wave * (1 - min_lr_ratio) + 1 + min_lr_ratio))

    return factor


def schedule_factor(settings: Mapping[str, Any]) -> Factor:
    """Return the schedule's learning-rate factor by step, from the keys of ``optim``."""
    warmup = settings["lr_warmup_steps"]
    if settings["lr_scheduler_type"] == "constant":
        return _warmed_up(warmup, lambda step: 1.0)
    names = ("total_training_steps", "min_lr_ratio", "num_cycles")
    return _warmed_up(warmup, _cosine(warmup, *(settings[name] for name in names)))


def get_constant_schedule_with_warmup(optimizer: Optimizer, num_warmup_steps: int, last_epoch: int = -1) -> LambdaLR:
    """Rise linearly to the base rate and stay there."""
    return LambdaLR(optimizer, _warmed_up(num_warmup_steps, lambda step: 1.0), last_epoch)


def get_cosine_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    init_lr_ratio: float | None = None,
) -> LambdaLR:
    """Rise linearly from ``init_lr_ratio`` (default 0), then fall along a cosine to ``min_lr_ratio``.

    Raises: ValueError when a ratio is outside [0, 1].
    """
    start = 0.0 if init_lr_ratio is None else init_lr_ratio
    for name, ratio in (("min_lr_ratio", min_lr_ratio), ("init_lr_ratio", start)):
        if not 0.0 <= ratio <= 1.0:
            raise ValueError(f"optim.{name} must be in [0, 1], got {ratio}")
    cosine = _cosine(num_warmup_steps, num_training_steps, min_lr_ratio, num_cycles)
    return LambdaLR(optimizer, _warmed_up(num_warmup_steps, cosine, start), last_epoch)


def get_wsd_schedule_with_warmup(
    optimizer: Optimizer,
    num_warmup_steps: int,
    num_training_steps: int,
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
    last_epoch: int = -1,
    stable_ratio: float = 0.9,
) -> LambdaLR:
    """Rise, stay for ``stable_ratio`` of the remaining steps, then fall along a cosine to ``min_lr_ratio``."""
    decay_start = num_warmup_steps + int((num_training_steps - num_warmup_steps) * stable_ratio)

    def stable_then_cosine(step: int) -> float:
        if step < decay_start:
            return 1.0
        if step >= num_training_steps:
            return min_lr_ratio
        progress = (step - decay_start) / max(1, num_training_steps - decay_start)
        wave = 0.5 * (1.0 + math.cos(math.pi * num_cycles * 2.0 * progress))
        return (1.0 - min_lr_ratio) * max(0.0, wave) + min_lr_ratio

    return LambdaLR(optimizer, _warmed_up(num_warmup_steps, stable_then_cosine), last_epoch)
