"""Scorers that come with the framework, chosen by ``data_source``."""

from collections.abc import Callable
from typing import Any

from verl.utils.reward_score import gsm8k, math_reward

SCORERS: dict[str, Callable[[str, str], Any]] = {
    "openai/gsm8k": gsm8k.compute_score,
    "lighteval/MATH": math_reward.compute_score,
    "DigitalLearningGmbH/MATH-lighteval": math_reward.compute_score,
    "HuggingFaceH4/MATH-500": math_reward.compute_score,
}


class UnknownDataSourceError(NotImplementedError, ValueError):
    """No scorer is known for a ``data_source``."""


def default_compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    concurrent_semaphore: Any = None,
    memory_limit_mb: int | None = None,
) -> float | dict[str, Any]:
    """Score a response by the scorer of its data source.

    The last three arguments are for scorers that run code.

    Raises: UnknownDataSourceError for a source without one.
    """
    scorer = SCORERS.get(data_source)
    if scorer is None:
        raise UnknownDataSourceError(
            f"no scorer for data_source={data_source!r}; known are {sorted(SCORERS)}. For data of your own set "
            "custom_reward_function.path to a Python file that defines compute_score"
        )
    result = scorer(solution_str, ground_truth)
    if isinstance(result, dict):
        return result
    return float(result[0] if isinstance(result, tuple) else result)
