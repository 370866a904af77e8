r"""Score DAPO's mathematics sets: compare the text after ``Answer:``, or the last ``\boxed``, with the ground truth.

Both are normalised first. There is no algebra, so scoring is fast and deterministic.
Source: DAPO (arXiv:2503.14476) section 4.1 (rule-based reward of +1 and -1).
"""

import re

from verl.utils.json_types import JsonObject
from verl.utils.reward_score.answers import same
from verl.utils.reward_score.latex_tokens import normal_form, tokenize
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from verl.utils.reward_score.quantities import rational, split_unit

SOLUTION_CLIP_CHARS = 300  # the answer is at the end
BOXED_CLIP_CHARS = 100
ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
NO_ANSWER = "[INVALID]"

_MATH = re.compile(r"\$([^$]*)\$")
_LETTER = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
_SUM = re.compile(r"\S\s*[+-]")


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> JsonObject:
    """Return ``score`` (1 or -1), ``acc`` (whether the answer is correct) and ``pred`` (the answer).

    Args:
        strict_box_verify: take the answer from the last box only.
        pause_tokens_index: positions of the response's pause tokens; the last one starts the answer's box.
    """
    correct, pred = verify(solution_str[-SOLUTION_CLIP_CHARS:], ground_truth, strict_box_verify, pause_tokens_index)
    return {"score": 1.0 if correct else -1.0, "acc": correct, "pred": pred}


def verify(
    solution_str: str, answer: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> tuple[bool, str]:
    """Return whether a text's answer is correct, and the answer."""
    if strict_box_verify:
        end = pause_tokens_index[-1] if pause_tokens_index else len(solution_str)
        boxed = last_boxed_only_string(solution_str[max(end - BOXED_CLIP_CHARS, 0) :])
        pred = remove_boxed(boxed) if boxed is not None else NO_ANSWER
        number = rational(normal_form(tokenize(pred)))
        is_equal = number is not None and number == rational(normal_form(tokenize(str(answer))))
        return pred == str(answer) or is_equal, pred
    answers = ANSWER.findall(solution_str)
    if not answers:
        return False, NO_ANSWER
    truth = _stated(str(answer))
    return same(_without_sum(_stated(answers[-1]), truth), truth), normalize_final_answer(answers[-1])


def _without_sum(answer: str, truth: str) -> str:
    """Reduce ``m + n = 25`` to 25 if the ground truth is a number, because AIME asks for such sums."""
    first, *rest = answer.split("=")
    is_sum = len(set(_LETTER.findall(first))) > 1 and _SUM.search(first) and not any(map(_LETTER.search, rest))
    is_number = rational(normal_form(tokenize(truth))) is not None
    return rest[-1] if rest and is_sum and is_number else answer


def _stated(answer: str) -> str:
    """Return the content of the answer's box or dollar signs, or the whole answer."""
    boxed = last_boxed_only_string(answer)
    if boxed is not None:
        return remove_boxed(boxed)
    math = _MATH.search(answer)
    return math[1] if math and math[1].strip() else answer


def normalize_final_answer(final_answer: str) -> str:
    """Return an answer as a text without names, units, signs of units, text commands and spaces."""
    value, _ = split_unit(tokenize(_stated(final_answer.split("=")[-1].strip())))
    return normal_form(value)
