"""The reward function of the sums."""

import re
from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return 1 if the last number of a response is the ground truth, else 0."""
    numbers = re.findall(r"\d+", solution_str)
    return float(bool(numbers) and numbers[-1].lstrip("0").rjust(1, "0") == ground_truth)
