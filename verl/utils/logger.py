"""Log lines that name their rank."""

import logging
import time

import torch.distributed as dist

from verl.utils.observe.console import get_console
from verl.utils.observe.tracking import LocalLogger

__all__ = [
    "DecoratorLoggerBase",
    "LocalLogger",
    "log_with_rank",
    "print_rank_0",
    "print_with_rank",
    "print_with_rank_and_timer",
]


def print_rank_0(message: str) -> None:
    """Write a line to the console on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        get_console().info("%s", message)


def print_with_rank(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    """Write a line that names the rank; with ``log_only_rank_0`` only on rank 0."""
    if not log_only_rank_0 or rank == 0:
        get_console().info("[Rank %d] %s", rank, message)


def print_with_rank_and_timer(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    """Write a line with time and rank; with ``log_only_rank_0`` only on rank 0."""
    if not log_only_rank_0 or rank == 0:
        get_console().info("[%s] [Rank %d] %s", time.strftime("%Y-%m-%d %H:%M:%S"), rank, message)


def log_with_rank(
    message: str, rank: int, logger: logging.Logger, level: int = logging.INFO, log_only_rank_0: bool = False
) -> None:
    """Log a message that names the rank; with ``log_only_rank_0`` only on rank 0."""
    if not log_only_rank_0 or rank == 0:
        logger.log(level, "[Rank %d] %s", rank, message)


class DecoratorLoggerBase:
    """Base of decorators that log: ``logging_function`` writes to a logger if given, else to the console."""

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        rank: int = 0,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role = role
        self.logger = logger
        self.level = level
        self.rank = rank
        self.log_only_rank_0 = log_only_rank_0

    def logging_function(self, log_str: str) -> None:
        """Write a line that starts with the name of the role."""
        if self.logger is None:
            print_with_rank(f"{self.role} {log_str}", self.rank, self.log_only_rank_0)
        else:
            log_with_rank(f"{self.role} {log_str}", self.rank, self.logger, self.level, self.log_only_rank_0)
