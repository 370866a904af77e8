r"""Score competition mathematics: compare the last ``\boxed`` or stated answer as text, number and formula."""

import re
from fractions import Fraction

from verl.utils.reward_score import math_verify
from verl.utils.reward_score.answers import Judge, same, same_values
from verl.utils.reward_score.latex_math import COMMANDS, LONGEST_CHARS, agree, proportional
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed
from verl.utils.reward_score.quantities import rational

_STATED = re.compile(r"(?i)\banswer\s*(?:is|:|=)\s*:?\s*([^\n]+)")
_MATH = re.compile(r"\$+([^$]+)\$+|\\\((.+?)\\\)|\\\[(.+?)\\\]")
LONGEST_ANSWER_CHARS = 500
_NO_FORMULA = re.compile(
    r"(?<![a-zA-Z\\])(?!(?:pi|sqrt|sin|cos|tan|cot|sec|csc|log|exp)(?![a-zA-Z]))[a-zA-Z]{3,}|(?<!\\)[A-Z]{2,}"  # words
    r"|[:']|\d{4}-\d\d-\d\d|\d\d?/\d\d?/\d{4}|[A-Z]\\times ?[A-Z]"  # times and ratios, dates, products of sets
    r"|[^\0-\x7f]|\d \d|\d_|\\frac\{d\w?\}\{d\w\}"  # non-ASCII letters, two numbers, a base, derivatives
)
_COMMAND = re.compile(r"\\([a-zA-Z]+)")
_COMMANDS_OF_FORMULAS = COMMANDS | {"infty", "lfloor", "rfloor", "lceil", "rceil", "overline", "vec", "mathbb", "bmod"}
_MIXED = re.compile(r"(?<![\w.}])(\d+)(\\frac\{\d+\}\{\d+\})")
_OPEN_ARGUMENT = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc|log|ln)(?![a-zA-Z({^_])")


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
    return same(answer, truth, Judge(same_formulas, same_equations))


def same_formulas(one: str, other: str) -> bool:
    """Return whether two values are equal as texts, numbers or formulas.

    Numbers decide alone, and words are never formulas. Formulas are equal if their values at random points are. The
    library math-verify decides where those cannot be computed, and where the argument of a function has no brackets.
    """
    if same_values(one, other):
        return True
    numbers = rational(one), rational(other)
    if None not in numbers or not one or not other or not (_is_formula(one) and _is_formula(other)):
        return False
    texts = [_as_formula(text, number) for text, number in zip((one, other), numbers, strict=True)]
    verdict = None if any(_OPEN_ARGUMENT.search(text) for text in texts) else agree(*texts)
    return math_verify.equal(*texts) if verdict is None else verdict


def same_equations(one: str, other: str) -> bool:
    """Return whether ``one = 0`` and ``other = 0`` differ by a factor only."""
    verdict = proportional(one, other)
    return same_formulas(one, other) and not same_formulas(one, "0") if verdict is None else verdict


def _is_formula(text: str) -> bool:
    opening, closing = (sum(map(text.count, brackets)) for brackets in ("([{", ")]}"))
    return (
        opening == closing and not _NO_FORMULA.search(text) and _COMMANDS_OF_FORMULAS.issuperset(_COMMAND.findall(text))
    )


def _as_formula(text: str, number: Fraction | None) -> str:
    """Return a number as a ratio, and mixed numbers as sums, since a formula would take them for products."""
    if number is None or len(text) > LONGEST_CHARS:
        return _MIXED.sub(r"(\1+\2)", text)
    return str(number.numerator) if number.denominator == 1 else f"({number.numerator}/{number.denominator})"
