r"""Score Geometry3K: thoughts in ``<think>`` tags, then a ``\boxed`` answer, which mathruler grades."""

from verl.utils.reward_score import GEO

LONGEST_ANSWER_CHARS = 500  # mathruler's parser takes minutes for a long repetitive answer


def format_reward(predict_str: str) -> float:
    """Return 1 if the text has thoughts followed by a box, else 0.

    It starts with ``<think>``, or inside the thought if the prompt has opened it, as prompts of thinking models do.
    """
    thought, end, answer = predict_str.partition("</think>")
    is_opened = thought.startswith("<think>") or "<think>" not in thought
    return float(bool(end) and is_opened and "}" in answer.partition("\\boxed{")[2])


def acc_reward(predict_str: str, ground_truth: str, use_boxed: bool = True) -> float:
    """Return 1 if the boxed answer (or, without ``use_boxed``, the text) is equivalent to the ground truth, else 0.

    Raises: MissingPackage without mathruler.
    """
    GEO.require("geo3k")
    from mathruler.grader import extract_boxed_content, grade_answer

    answer = extract_boxed_content(predict_str) if use_boxed else predict_str
    if answer is not None and len(answer) > LONGEST_ANSWER_CHARS:
        return float(answer == str(ground_truth))
    return float(grade_answer(answer, str(ground_truth)))


def compute_score(predict_str: str, ground_truth: str, use_boxed: bool = True, format_score: float = 0.1) -> float:
    """Return accuracy and format, weighted by ``1 - format_score`` and ``format_score``."""
    accuracy = acc_reward(predict_str, ground_truth, use_boxed)
    return (1.0 - format_score) * accuracy + format_score * format_reward(predict_str)
