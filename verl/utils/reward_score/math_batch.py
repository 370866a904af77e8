"""Score MATH with the reward manager ``batch``."""

from collections.abc import Sequence
from typing import Any

from verl.utils.reward_score import math_reward


def compute_score_batched(
    data_sources: Sequence[str], solution_strs: Sequence[str], ground_truths: Sequence[str], extra_infos: Sequence[Any]
) -> list[float]:
    """Return the score of each response; see ``math_reward.compute_score``."""
    columns = zip(solution_strs, ground_truths, strict=True)
    return [math_reward.compute_score(solution, truth) for solution, truth in columns]
