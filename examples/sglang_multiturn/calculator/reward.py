"""The reward function of the products."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1 if the text after the last ``=`` of the response is the ground truth, else 0."""
    return float("=" in solution_str and solution_str.rpartition("=")[2] == ground_truth)
