"""Import path of ``apply_monkey_patch`` in the established verl interface."""

from verl.compat.monkey_patch import apply_monkey_patch

__all__ = ["apply_monkey_patch"]
