"""Answers of search agents: what stands in the last ``<answer>``, compared with the accepted answers as text."""

import re
import string
from collections.abc import Iterable, Mapping
from typing import Any

MOST_TAGS = 10  # a response with more of them is guessing
_OPEN, _CLOSE = "<answer>", "</answer>"
_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> float:
    """Return ``score`` where the answer is one of the accepted ones, a quarter of it where answer tags abound.

    A wrong answer gets ``format_score``, none gets 0.

    Args: ``ground_truth`` holds the accepted answers as ``target``; ``method`` is ``strict``, the only one.
    """
    return _score(solution_str, ground_truth, em_check, format_score, score)


def compute_score_subem(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Score as ``compute_score``; it is enough that the answer contains an accepted one."""
    return _score(solution_str, ground_truth, subem_check, format_score, score)


def _score(solution_str: str, ground_truth: Any, check: Any, format_score: float, score: float) -> float:
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    if not check(answer, targets(ground_truth)):
        return format_score
    tags = max(solution_str.count(_OPEN), solution_str.count(_CLOSE))
    return score / 4 if tags > MOST_TAGS else score


def extract_solution(solution_str: str) -> str | None:
    """Return what stands in the last pair of answer tags; None without one."""
    answer, at = None, 0
    while (start := solution_str.find(_OPEN, at)) >= 0:
        end = solution_str.find(_CLOSE, start)
        if end < 0:  # no pattern: one of them looks for the end anew at every tag that is not closed
            break
        answer, at = solution_str[start + len(_OPEN) : end].strip(), end + len(_CLOSE)
    return answer


def targets(ground_truth: Any) -> list[str]:
    """Return the accepted answers: ``ground_truth["target"]``, or the ground truth itself; one or several."""
    accepted = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    return [accepted] if isinstance(accepted, str) else [str(each) for each in accepted]


def normalize_answer(text: str) -> str:
    """Return a text in lower case without punctuation, articles and superfluous spaces."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def em_check(prediction: str, golden_answers: Iterable[str]) -> bool:
    """Whether the prediction is one of the answers."""
    prediction = normalize_answer(prediction)
    return any(normalize_answer(golden) == prediction for golden in golden_answers)


def subem_check(prediction: str, golden_answers: Iterable[str]) -> bool:
    """Whether the prediction contains one of the answers."""
    prediction = normalize_answer(prediction)
    return any(normalize_answer(golden) in prediction for golden in golden_answers)
