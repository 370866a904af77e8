"""Settings of the optimizer that a resume may change: the configuration wins over the checkpoint, and says so."""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

from verl.utils.loading import State

logger = logging.getLogger(__name__)

CONFIGURED_KEY = "configured"
"""Entry of a saved optimizer: the settings of each parameter group as the run was started with them."""

SCHEDULE_KEY = "schedule"
"""Entry of the saved extra state: the keys of ``optim`` that the schedule reads."""

Setting = float | str | tuple[float, ...]
Settings = dict[str, Setting]
_NUMBERS = ("weight_decay", "eps", "momentum")


def settings_of(groups: Sequence[Mapping[str, Any]]) -> list[Settings]:
    """Return the settings of each parameter group: the base learning rate and the other settings."""
    found: list[Settings] = []
    for group in groups:
        settings: Settings = {"lr": float(group["initial_lr"] if "initial_lr" in group else group["lr"])}
        settings |= {name: float(group[name]) for name in _NUMBERS if name in group}
        if "betas" in group:
            settings["betas"] = tuple(float(beta) for beta in group["betas"])
        found.append(settings)
    return found


def saved_settings(state: State) -> list[Settings]:
    """Return the settings that a saved optimizer was started with.

    Older checkpoints do not list them. Their groups hold the values in use, which are the same but for a learning rate
    that something other than a schedule of torch may have moved.
    """
    if CONFIGURED_KEY in state:
        return list(state[CONFIGURED_KEY])
    found = settings_of(state["param_groups"])
    for settings, group in zip(found, state["param_groups"], strict=True):
        if "initial_lr" not in group:
            del settings["lr"]
    return found


def changed_settings(saved: Sequence[Settings], own: Sequence[Settings]) -> list[Settings]:
    """Return the settings of each group that differ from the checkpoint, with this run's values."""
    return [
        {key: value for key, value in mine.items() if key in theirs and theirs[key] != value}
        for theirs, mine in zip(saved, own, strict=True)
    ]


def warn_of_changes(path: str, saved: Sequence[Settings], own: Sequence[Settings], keeps: bool) -> None:
    """Name both values of each setting that differs, once for all groups that differ alike."""
    pairs = {
        (key, theirs[key], value)
        for theirs, mine, changed in zip(saved, own, changed_settings(saved, own), strict=True)
        for key, value in changed.items()
    }
    use = "keeps the old value"
    if not keeps:
        use = "uses the new value; optim.use_checkpoint_opt_param_scheduler=true keeps the old one"
    for key, old, new in sorted(pairs, key=str):
        words = "optim.%s=%s, and was %s in the checkpoint %s: the run %s"
        logger.warning(words, key, _shown(new), _shown(old), path, use)


def apply_settings(groups: Sequence[dict[str, Any]], saved: Sequence[Settings], own: Sequence[Settings]) -> None:
    """Set this run's settings in loaded parameter groups, where they differ from the checkpoint's."""
    for group, theirs, changed in zip(groups, saved, changed_settings(saved, own), strict=True):
        for key, value in changed.items():
            if key != "lr":
                group[key] = value
                continue
            assert isinstance(value, float)
            base = theirs["lr"]
            assert isinstance(base, float)
            group["lr"] = group["lr"] * (value / base) if base else value
            if "initial_lr" in group:
                group["initial_lr"] = value


def follow_schedule(optimizer: torch.optim.Optimizer, schedule: LRScheduler) -> None:
    """Let a loaded schedule start from the base rates of the parameter groups, and the next step use its rate.

    A schedule of another length or warm-up gives another rate at the same step. For an unchanged schedule nothing
    changes.
    """
    groups = optimizer.param_groups
    if not all("initial_lr" in group for group in groups):
        return
    _set_base(schedule, [group["initial_lr"] for group in groups])
    if type(schedule) is LambdaLR:  # other schedules compute a rate from the one before
        for group, factor in zip(groups, schedule.lr_lambdas, strict=True):
            group["lr"] = group["initial_lr"] * factor(schedule.last_epoch)
    schedule._last_lr = [group["lr"] for group in groups]


def _set_base(schedule: LRScheduler, rates: list[float]) -> None:
    """Set the base rates of a schedule and of the schedules that it consists of."""
    schedule.base_lrs = list(rates)
    for part in getattr(schedule, "_schedulers", ()):
        _set_base(part, rates)


def _shown(value: Setting) -> str:
    return f"[{','.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
