"""Ranks of a process group as processes of a test."""

import time
from collections.abc import Callable
from typing import Any

import torch.multiprocessing as mp

from verl.utils.distributed import leave_process


class Ranks:
    """Processes that run one function, each with its rank; ``join`` waits for them."""

    def __init__(self, fn: Callable[..., None], args: tuple[Any, ...], nprocs: int) -> None:
        self._context = mp.spawn(_run_and_leave, args=(fn, args), nprocs=nprocs, join=False)

    def join(self, timeout_s: float = 240.0) -> None:
        """Wait until all have ended well.

        Raises: what ``mp.spawn`` raises for a rank that failed; TimeoutError naming the ranks that still run.
        """
        deadline = time.monotonic() + timeout_s
        try:
            while not self._context.join(timeout=max(0.0, deadline - time.monotonic()), grace_period=5):
                alive = [rank for rank, process in enumerate(self._context.processes) if process.is_alive()]
                if alive and time.monotonic() >= deadline:
                    raise TimeoutError(f"ranks {alive} did not end within {timeout_s:g} s")
        finally:
            for process in self._context.processes:
                process.kill()
                process.join()


def spawn_ranks(fn: Callable[..., None], args: tuple[Any, ...] = (), nprocs: int = 2, timeout_s: float = 240.0) -> None:
    """Run ``fn(rank, *args)`` on ``nprocs`` ranks to the end; see ``Ranks.join`` for what it raises."""
    Ranks(fn, args, nprocs).join(timeout_s)


def _run_and_leave(rank: int, fn: Callable[..., None], args: tuple[Any, ...]) -> None:
    """Run a rank; what it raises is reported by ``mp.spawn``, which knows exceptions only."""
    try:
        fn(rank, *args)
    except Exception:
        raise
    except BaseException as outcome:  # pytest.fail, SystemExit
        raise AssertionError(f"rank {rank} ended by {type(outcome).__name__}: {outcome}") from outcome
    leave_process(0)
