"""Timers, and the configuration of profilers."""

from verl.utils.profiler.config import ProfilerConfig
from verl.utils.profiler.performance import marked_timer, simple_timer

__all__ = ["ProfilerConfig", "marked_timer", "simple_timer"]
