"""The scorer of the recipe: algebraic equivalence for competition mathematics, the scorers of verl for the rest."""

from typing import Any

from verl.utils.reward_score import GroundTruth, default_compute_score, scorer_module

from . import entropy_math

MATH_MODULES = ("math_dapo", "math_reward", "prime_math")
"""The mathematical scorers of verl that this recipe replaces by ``entropy_math``."""


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: GroundTruth,
    extra_info: dict[str, Any] | None = None,
    sandbox_fusion_url: str | None = None,
    memory_limit_mb: int | None = None,
    sandbox_timeout_s: float | None = None,
    allow_unisolated: bool = False,
) -> float | dict[str, Any]:
    """Score a response; the options for code are passed on to ``default_compute_score``."""
    if scorer_module(data_source) in MATH_MODULES:
        return entropy_math.compute_score(solution_str, str(ground_truth))
    return default_compute_score(
        data_source,
        solution_str,
        ground_truth,
        extra_info,
        sandbox_fusion_url,
        memory_limit_mb=memory_limit_mb,
        sandbox_timeout_s=sandbox_timeout_s,
        allow_unisolated=allow_unisolated,
    )


_default_compute_score = compute_score
