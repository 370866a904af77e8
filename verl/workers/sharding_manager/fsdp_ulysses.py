"""Import path of ``FSDPUlyssesShardingManager`` in the established verl interface."""

from verl.compat.ulysses_context import FSDPUlyssesShardingManager

__all__ = ["FSDPUlyssesShardingManager"]
