r"""Score competition mathematics: 1 if the last ``\boxed``, or the stated answer, is equivalent to the truth, else 0.

DAPO's scorer compares texts and returns 1 or -1. This one compares by algebra, because the paper's models
write answers in any form.
"""

from typing import Any

from verl.utils.reward_score import prime_math


def compute_score(model_output: str, ground_truth: str) -> dict[str, Any]:
    """Return ``score`` (1 or 0), ``acc`` (whether the answer is correct) and ``pred`` (the answer)."""
    correct, _, answer = prime_math.compute_score(model_output, ground_truth)
    return {"score": float(correct), "acc": correct, "pred": answer}
