"""Helpers under the established names of ``verl.experimental.agent_loop.agent_loop``, for users' forks."""

from collections.abc import Sequence
from typing import Any


async def get_trajectory_info(step: int, index: Sequence[Any], validate: bool) -> list[dict[str, Any]]:
    """Name the trajectories of a batch, whose samples of a prompt stand next to each other.

    Args: ``step`` is that of the trainer, and ``index`` the number of each row's prompt in the data.
    Returns: ``step``, ``sample_index``, ``rollout_n`` (the number of the sample among those of its prompt, from 0) and
        ``validate`` of each row.
    """
    rows: list[dict[str, Any]] = []
    for number in index:
        is_next = bool(rows) and rows[-1]["sample_index"] == number
        sample = rows[-1]["rollout_n"] + 1 if is_next else 0
        rows.append({"step": step, "sample_index": number, "rollout_n": sample, "validate": validate})
    return rows
