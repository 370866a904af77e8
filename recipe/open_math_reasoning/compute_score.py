"""The scorer of the evaluation on AIME."""

from typing import Any

from verl.utils.reward_score import prime_math


def compute_score_data_source(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1 if the stated answer is algebraically equivalent to the ground truth, else 0."""
    return float(prime_math.compute_score(solution_str, ground_truth)[0])
