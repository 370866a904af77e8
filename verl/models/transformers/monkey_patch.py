"""Established path of ``apply_monkey_patch``."""

from verl.compat.monkey_patch import apply_monkey_patch

__all__ = ["apply_monkey_patch"]
