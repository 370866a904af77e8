"""The established path of the timers, marks and profilers of ``verl.utils.profiler``."""

from typing import Any

from verl.utils import profiler

__all__ = list(profiler.__all__)


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(profiler, name)
