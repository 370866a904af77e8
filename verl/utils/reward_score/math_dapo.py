r"""Score DAPO's mathematics sets: compare the text after ``Answer:``, or the last ``\boxed``, with the ground truth.

Both are normalised first. There is no algebra, so scoring is fast and deterministic.
Source: DAPO (arXiv:2503.14476) section 4.1 (rule-based reward of +1 and -1).
"""

import re
from typing import Any

from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

SOLUTION_CLIP_CHARS = 300  # the answer is at the end
BOXED_CLIP_CHARS = 100
ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
NO_ANSWER = "[INVALID]"

_UNITS = (
    "square ways integers dollars mph inches hours km units points feet minutes digits cents degrees cm gm pounds "
    "meters meals edges students childrentickets multiples sq mi days unit ft yards seconds people percent"
).split()
_UNIT = re.compile(r"(?<![a-zA-Z\\])(?:" + "|".join(sorted(_UNITS, key=len, reverse=True)) + r")(?![a-zA-Z])")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|overline|mbox)\{([^{}]*)\}")
_MATH = re.compile(r"\$([^$]*)\$")
_BARE_FRACTION = re.compile(r"(frac)([^{\s])([^{\s])")
_BARE_ROOT = re.compile(r"(sqrt)([^{\s\[])")


def compute_score(
    solution_str: str, ground_truth: str, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
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
        return pred == str(answer), pred
    answers = ANSWER.findall(solution_str)
    pred = normalize_final_answer(answers[-1]) if answers else NO_ANSWER
    return pred == normalize_final_answer(str(answer)), pred


def normalize_final_answer(final_answer: str) -> str:
    """Normalise an answer: drop dollars, units, text commands, thousands separators and spaces."""
    text = final_answer.split("=")[-1].strip()
    boxed = last_boxed_only_string(text)
    if boxed is not None:
        text = remove_boxed(boxed)
    elif math := _MATH.search(text):
        text = math[1]
    text = _UNIT.sub("", text.replace("\\%", "").replace("%", "").replace("^\\circ", "").replace("\\$", ""))
    text = _WRAPPED.sub(r"\1", text).replace("\\!", "").replace("\\,", "").replace("\\ ", "")
    text = text.replace("tfrac", "frac").replace("dfrac", "frac")
    text = _BARE_ROOT.sub(r"\1{\2}", _BARE_FRACTION.sub(r"\1{\2}{\3}", text))
    text = re.sub(r"\s+", "", text.replace("$", "")).rstrip(".")
    without_commas = text.replace(",", "")
    return without_commas if without_commas.removeprefix("-").isdigit() else text
