"""Import path of the established verl interface for log lines that name their rank."""

from verl.compat.logger import (
    DecoratorLoggerBase,
    log_with_rank,
    print_rank_0,
    print_with_rank,
    print_with_rank_and_timer,
)
from verl.utils.observe.tracking import LocalLogger

__all__ = [
    "DecoratorLoggerBase",
    "LocalLogger",
    "log_with_rank",
    "print_rank_0",
    "print_with_rank",
    "print_with_rank_and_timer",
]
