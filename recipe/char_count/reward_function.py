r"""The reward function of the counting task."""

from typing import Any

from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed


def char_count_reward_function(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    r"""Return 1 if the last ``\boxed`` of the response holds exactly the count, else 0."""
    boxed = last_boxed_only_string(solution_str)
    return float(boxed is not None and remove_boxed(boxed) == ground_truth)
