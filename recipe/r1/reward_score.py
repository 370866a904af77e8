"""The scorer of the evaluation, which picks a task's scorer by the data source."""

from typing import Any

from .tasks import TASKS

SCORERS = {part.data_source: task.compute_score for task in TASKS.values() for part in task.parts}


def reward_func(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return the score of a response, 1 or 0.

    Raises: ValueError for a data source that no task has.
    """
    if data_source not in SCORERS:
        raise ValueError(f"no task of recipe.r1 has the data source {data_source!r}: it is one of {sorted(SCORERS)}")
    return SCORERS[data_source](solution_str, ground_truth)
