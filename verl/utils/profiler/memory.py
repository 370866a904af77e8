"""Memory of the device and of the process, logged around a call."""

import functools
import logging
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from verl.utils.memory_utils import get_memory_info

P = ParamSpec("P")
T = TypeVar("T")


def log_gpu_memory_usage(
    head: str, logger: logging.Logger | None = None, level: int = logging.DEBUG, rank: int | None = 0
) -> None:
    """Log what is allocated, reserved and in use in GiB, on one rank, or with ``rank=None`` on all."""
    import torch

    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if rank is not None and initialized and torch.distributed.get_rank() != rank:
        return
    logger = logger or logging.getLogger(__name__)
    if not logger.isEnabledFor(level):
        return
    figures = ", ".join(f"{name} {value:.2f}" for name, value in get_memory_info().items())
    logger.log(level, "%s, memory in GiB: %s", head, figures)


class GPUMemoryLogger:
    """Log memory before and after each call of the decorated function."""

    def __init__(
        self,
        role: str,
        logger: logging.Logger | None = None,
        level: int = logging.DEBUG,
        log_only_rank_0: bool = True,
    ) -> None:
        self.role, self.logger, self.level = role, logger, level
        self.rank = 0 if log_only_rank_0 else None

    def __call__(self, func: Callable[P, T]) -> Callable[P, T]:
        """Decorate a function."""

        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> T:
            name = f"{self.role} {func.__name__}"
            log_gpu_memory_usage(f"before {name}", self.logger, self.level, self.rank)
            result = func(*args, **kwargs)
            log_gpu_memory_usage(f"after {name}", self.logger, self.level, self.rank)
            return result

        return call
