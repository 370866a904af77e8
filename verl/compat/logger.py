"""Log lines that name their rank."""

import logging
import time
from dataclasses import dataclass

import torch.distributed as dist

from verl.utils.observe.console import get_console


def print_rank_0(message: str) -> None:
    """Write a line to the console on rank 0."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        get_console().info("%s", message)


def print_with_rank(message: str, rank: int = 0, log_only_rank_0: bool = False) -> None:
    """Write a line that names the rank; with ``log_only_rank_0`` only on rank 0."""
    log_with_rank(message, rank, get_console(), log_only_rank_0=log_only_rank_0)


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


@dataclass(eq=False)
class DecoratorLoggerBase:
    """Base of decorators that log: ``logging_function`` writes to a logger if given, else to the console."""

    role: str
    logger: logging.Logger | None = None
    level: int = logging.DEBUG
    rank: int = 0
    log_only_rank_0: bool = True

    def logging_function(self, log_str: str) -> None:
        """Write a line that starts with the name of the role."""
        level = logging.INFO if self.logger is None else self.level
        log_with_rank(f"{self.role} {log_str}", self.rank, self.logger or get_console(), level, self.log_only_rank_0)
