"""The reward function of the lockers."""

from typing import Any

from verl.utils.reward_score import search_r1_like_qa_em


def compute_score(
    data_source: str, solution_str: str, ground_truth: dict[str, Any], extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1 if the text in the last ``<answer>`` is the right code, else 0."""
    return search_r1_like_qa_em.compute_score(solution_str, ground_truth)
