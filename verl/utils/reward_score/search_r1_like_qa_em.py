"""Score search agents: compare the text in the last ``<answer>`` with the accepted answers."""

import operator
import re
import string
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence

from verl.utils.json_types import Json

Accepted = str | int | float | Sequence[str] | Mapping[str, Json]
"""The accepted answer or answers, or a mapping with them as ``target``."""

MOST_TAGS = 10  # a response with more tags is guessing
_OPEN = "<answer>"
_CLOSE = "</answer>"
_ARTICLES = ("a", "an", "the")
_NUMBER = re.compile(r"(?<![\w.,-])([-\u2212]?)(\d{1,3}(?:,\d{3})+(?:\.\d+)?|\d+(?:\.\d+)?|\.\d+)(?![\d]|[.,]\d)")
_BETWEEN_DIGITS = re.compile(r"(?<=\d)[^\w\s\0\1](?=\d)")
_SIGNS = str.maketrans("\0\1", "-.")  # restores signs and decimal points of numbers after the removal of punctuation


def compute_score(
    solution_str: str, ground_truth: Accepted, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return ``score`` for an accepted answer, or a quarter of it if the response has more than 10 answer tags.

    A wrong answer gets ``format_score``, a missing one 0.

    Args: ``method`` is ``strict``, the only one.
    """
    return _score(solution_str, ground_truth, operator.eq, format_score, score)


def compute_score_subem(
    solution_str: str, ground_truth: Accepted, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Score like ``compute_score``, but accept an answer that contains an accepted one."""
    return _score(solution_str, ground_truth, operator.contains, format_score, score)


def _score(
    solution_str: str, ground_truth: Accepted, accepts: Callable[[str, str], bool], format_score: float, score: float
) -> float:
    answer = extract_solution(solution_str)
    if answer is None:
        return 0.0
    prediction = normalize_answer(answer)
    accepted = [normalize_answer(golden) for golden in targets(ground_truth)]
    if not prediction or not any(golden and accepts(prediction, golden) for golden in accepted):
        return format_score
    tags = max(solution_str.count(_OPEN), solution_str.count(_CLOSE))
    return score / 4 if tags > MOST_TAGS else score


def extract_solution(solution_str: str) -> str | None:
    """Return the text in the last pair of answer tags; None without one.

    A regular expression would take quadratic time, because it searches for the end again at every unclosed tag.
    """
    closed = [part for part in solution_str.split(_CLOSE)[:-1] if _OPEN in part]
    return closed[-1].partition(_OPEN)[2].strip() if closed else None


def targets(ground_truth: Accepted) -> list[str]:
    """Return the list of accepted answers."""
    accepted = ground_truth["target"] if isinstance(ground_truth, Mapping) else ground_truth
    if isinstance(accepted, str) or not isinstance(accepted, Iterable):
        return [str(accepted)]
    return [str(each) for each in accepted]


def normalize_answer(text: str) -> str:
    """Return a text in lower case without punctuation, articles and repeated spaces; a text of articles keeps them.

    Numbers keep sign and decimal point, and lose separators and trailing zeros: 12.0 is 12, and 1.5 is not 15.
    Punctuation between digits is a space: 3/4 is not 34.
    """
    text = _NUMBER.sub(_plain_number, unicodedata.normalize("NFKC", text).lower())
    text = _BETWEEN_DIGITS.sub(" ", text)
    kept = [each for each in text if each not in string.punctuation and unicodedata.category(each)[0] != "P"]
    words = "".join(kept).translate(_SIGNS).split()
    return " ".join([word for word in words if word not in _ARTICLES] or words)


def _plain_number(match: re.Match[str]) -> str:
    whole, _, decimals = match[2].replace(",", "").partition(".")
    number = "\1".join(filter(None, (whole or "0", decimals.rstrip("0"))))
    return "\0" + number if match[1] else number
