r"""Score mathematical answers with the library math-verify, which extracts, parses and compares them by algebra."""

import threading

from verl.utils.reward_score import MATH

TIME_LIMIT_S = 3
"""Limit of one step of math-verify: reading an expression, or comparing two."""


def compute_score(model_output: str, ground_truth: str, timeout_score: float = 0) -> float:
    """Return 1 if the answer is equivalent to the ground truth, 0 if not, ``timeout_score`` on a timeout.

    math-verify's time limits use alarms, so call it in the main thread, as the reward managers do.

    Raises: MissingExtraError without math-verify.
    """
    MATH.require("math_verify")
    from math_verify.errors import TimeoutException
    from math_verify.metric import math_metric
    from math_verify.parser import ExprExtractionConfig, LatexExtractionConfig

    verify = math_metric(
        gold_extraction_target=(LatexExtractionConfig(),),
        pred_extraction_target=(ExprExtractionConfig(), LatexExtractionConfig()),
    )
    try:
        return float(verify([f"\\boxed{{{ground_truth}}}"], [model_output])[0])
    except TimeoutException:
        return timeout_score


def equal(one: str, other: str) -> bool:
    """Return whether math-verify takes two LaTeX expressions for equal; False where it cannot tell in time.

    Its time limits use alarms, which only the main thread has. In another thread the limit of the caller holds.

    Raises: MissingExtraError without math-verify.
    """
    MATH.require("prime_math")
    from math_verify import LatexExtractionConfig, parse, verify

    limit = TIME_LIMIT_S if threading.current_thread() is threading.main_thread() else None
    parsed = [parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], parsing_timeout=limit) for text in (one, other)]
    # 30 digits: 0.333333333333 is not 1/3
    return bool(all(parsed)) and bool(
        verify(*parsed, float_rounding=30, numeric_precision=60, timeout_seconds=limit, raise_on_error=False)
    )
