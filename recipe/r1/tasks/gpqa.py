"""GPQA diamond: multiple choice in the sciences; the response ends with ``Answer: <letter>``."""

import random
import re

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet

from .task import Part, Task

LETTERS = "ABCD"
COLUMNS = ("Question", "Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
INSTRUCTION = (
    "Answer the following multiple choice question. Think step by step, and end your response with a line of the form "
    "'Answer: LETTER', where LETTER is one of A, B, C and D."
)
ANSWER = re.compile(r"(?i)\banswer\W{0,6}:\W{0,6}([A-D])\b")
"""Matches the stated letter, which may be bold, in brackets or between dollar signs."""


def compute_score(model_output: str, ground_truth: str) -> float:
    """Return 1 if the last stated letter is the right one, else 0."""
    found = ANSWER.findall(model_output)
    return float(bool(found) and found[-1].upper() == ground_truth)


def problem(example: Row, index: int) -> tuple[str, str]:
    """Return the prompt and the letter of the right choice; the index alone determines the order of the choices."""
    order = random.Random(index).sample(range(len(LETTERS)), len(LETTERS))
    choices = [str(example[COLUMNS[1 + at]]).strip() for at in order]
    listed = "\n".join(f"{letter}) {choice}" for letter, choice in zip(LETTERS, choices, strict=True))
    return f"{INSTRUCTION}\n\n{example['Question']}\n\n{listed}", LETTERS[order.index(0)]


def _made_up(rng: random.Random) -> Row:
    mass, acceleration = rng.sample(range(2, 10), 2)
    question = f"Which force gives a body of {mass} kg an acceleration of {acceleration} m/s^2?"
    force = mass * acceleration
    return dict(
        zip(COLUMNS, (question, f"{force} N", f"{force + 1} N", f"{force + 10} N", f"{force * 2} N"), strict=True)
    )


RAW = RawSet("Idavidrein/gpqa", COLUMNS, _made_up, splits=("train",), subset="gpqa_diamond")
GPQA_DIAMOND = Task("science", (Part("Idavidrein/gpqa", RAW),), problem, compute_score)
