"""Scoring in processes, under the established names of ``verl.workers.reward_manager.prime``, for users' forks.

``PrimeRewardManager`` scores without these.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from typing import Any

from verl.utils.process.pool import DeadlineExceeded, DeadlinePool, Outcome, ScorerFailed

TIMEOUT_S = 300.0


async def parallel_compute_score_async(
    evaluation_func: Callable[..., Any],
    completions: Sequence[str],
    references: Sequence[Any],
    tasks: Sequence[Any],
    extra_info: Sequence[Any] | None = None,
    num_processes: int = 64,
) -> list[float]:
    """Score each response by ``evaluation_func(task, completion, reference, extra_info)`` in a process.

    The function returns the score, or a sequence that begins with it.

    Returns: the scores; 0 where the function raised or took longer than 300 seconds.
    """
    given = [None] * len(tasks) if extra_info is None else extra_info
    calls = list(zip(tasks, completions, references, given, strict=True))
    pool = DeadlinePool(evaluation_func, num_processes)
    try:
        outcomes = await asyncio.to_thread(pool.map, calls, TIMEOUT_S, math.inf)
    finally:
        pool.close()
    return [_score(outcome) for outcome in outcomes]


def run_reward_scoring(
    evaluation_func: Callable[..., Any],
    completions: Sequence[str],
    references: Sequence[Any],
    tasks: Sequence[Any],
    extra_info: Sequence[Any] | None = None,
    num_processes: int = 64,
) -> list[float]:
    """Do the same where no event loop runs."""
    scoring = parallel_compute_score_async(evaluation_func, completions, references, tasks, extra_info, num_processes)
    return asyncio.run(scoring)


def _score(outcome: Outcome) -> float:
    if outcome is None or isinstance(outcome, DeadlineExceeded | ScorerFailed):
        return 0.0
    return float(outcome[0] if isinstance(outcome, Sequence) else outcome)
