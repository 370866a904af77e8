"""The reward of the products: whether the last turn says the right number."""

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1 if what follows the last ``=`` is the ground truth, else 0."""
    return float("=" in solution_str and solution_str.rpartition("=")[2] == ground_truth)
