r"""Score mathematical answers with the library math-verify, which extracts, parses and compares them by algebra."""

from verl.utils.reward_score import MATH


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
