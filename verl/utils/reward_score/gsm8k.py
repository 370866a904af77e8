"""Score GSM8K: the answer is a number after ``####``."""

import re

from verl.utils.reward_score.quantities import rational

SOLUTION_CLIP_CHARS = 300  # the answer is at the end, and searching a long text is slow
STRICT = re.compile(r"####\s*(-?[0-9.,]+)")
FLEXIBLE = re.compile(r"-?[0-9.,]+")


def extract_solution(solution_str: str, method: str = "strict") -> str | None:
    """Return the last answer in a text, without commas; None if there is none.

    Args:
        method: ``strict`` takes the number after ``####``, ``flexible`` the last number.

    Raises: ValueError for an unknown method.
    """
    tail = solution_str[-SOLUTION_CLIP_CHARS:]
    if method == "strict":
        answers = STRICT.findall(tail)
    elif method == "flexible":
        answers = FLEXIBLE.findall(tail)
    else:
        raise ValueError(f"method must be 'strict' or 'flexible', got {method!r}")
    # a lone full stop or comma is not a number, and a full stop after a number ends the sentence
    numbers = [answer.replace(",", "").rstrip(".") for answer in answers]
    numbers = [number for number in numbers if any(character.isdigit() for character in number)]
    return numbers[-1] if numbers else None


def compute_score(
    solution_str: str, ground_truth: str, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """Return ``score`` for the right answer, ``format_score`` for a wrong one, 0 for none."""
    answer = extract_solution(solution_str, method)
    if answer is None:
        return 0.0
    truth = str(ground_truth).replace(",", "").strip()
    number = rational(answer)
    is_right = answer == truth or (number is not None and number == rational(truth))
    return score if is_right else format_score
