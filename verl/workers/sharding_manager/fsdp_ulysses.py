"""Established path of ``FSDPUlyssesShardingManager``."""

from verl.compat.ulysses_context import FSDPUlyssesShardingManager

__all__ = ["FSDPUlyssesShardingManager"]
