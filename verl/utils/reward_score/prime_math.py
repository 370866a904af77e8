r"""Score competition mathematics: compare the last ``\boxed`` or stated answer as text, number and formula."""

import re

from verl.utils.reward_score.latex_math import agree
from verl.utils.reward_score.math_reward import is_equiv, last_boxed_only_string, normalize, remove_boxed, split_answer

_STATED = re.compile(r"(?i)\banswer\s*(?:is|:|=)\s*:?\s*([^\n]+)")
_MATH = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]")
LONGEST_ANSWER_CHARS = 500
_SETS = (r"\{", r"\}")


def compute_score(model_output: str, ground_truth: str) -> tuple[bool, bool, str]:
    """Return whether the answer is correct, whether the response states it as an answer, and the answer."""
    answer, is_stated = extract_answer(str(model_output))
    boxed = last_boxed_only_string(str(ground_truth))
    truth = str(ground_truth) if boxed is None else remove_boxed(boxed)
    return is_stated and grade_answer(answer, truth), is_stated, answer


def extract_answer(text: str) -> tuple[str, bool]:
    """Return the last answer of a text and whether it is stated as one, in a box or after "the answer is"."""
    boxed = last_boxed_only_string(text)
    if boxed is not None:
        return remove_boxed(boxed).strip(), True
    stated = _STATED.findall(text)
    if not stated:
        return text.strip()[-LONGEST_ANSWER_CHARS:], False
    answer = stated[-1].strip()
    math = _MATH.search(answer)
    return next(filter(None, math.groups())).strip() if math else answer.rstrip(". "), True


def grade_answer(answer: str, truth: str) -> bool:
    """Return whether an answer is equivalent to the truth."""
    if max(len(answer), len(truth)) > LONGEST_ANSWER_CHARS:
        return answer == truth
    return is_equiv(answer, truth) or _same(normalize(answer), normalize(truth))


def _same(one: str, other: str) -> bool:
    if is_equiv(one, other):
        return True
    parts = split_answer(one)
    other_parts = split_answer(other)
    if (parts is None) != (other_parts is None):
        return False
    if parts is None or other_parts is None:
        return agree(one, other) is True
    if len(parts) != len(other_parts):
        return False
    if (parts[0], parts[-1]) == (other_parts[0], other_parts[-1]) == _SETS:  # sets are unordered
        left = list(other_parts[1:-1])
        for part in parts[1:-1]:
            match = next((each for each in left if _same(part, each)), None)
            if match is None:
                return False
            left.remove(match)
        return True
    return all(_same(a, b) for a, b in zip(parts, other_parts, strict=True))
