r"""AIME 2024 and CNMO 2024: competition mathematics with one answer, which the response gives in ``\boxed``."""

import random
from collections.abc import Callable

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet
from verl.utils.reward_score import prime_math

from .task import Part, Task

INSTRUCTION = r"Please reason step by step, and put your final answer within \boxed{}."


def compute_score(model_output: str, ground_truth: str) -> float:
    """Return 1 if the answer is algebraically equivalent to the ground truth, else 0."""
    return float(prime_math.compute_score(model_output, ground_truth)[0])


def problem_of(question: str, answer: str) -> Callable[[Row, int], tuple[str, str]]:
    """Return the function ``problem`` of a task whose rows have the given columns."""

    def problem(example: Row, index: int) -> tuple[str, str]:
        return f"{example[question]}\n{INSTRUCTION}", str(example[answer])

    return problem


def _product(rng: random.Random) -> tuple[int, int]:
    return rng.randint(2, 30), rng.randint(2, 30)


def _aime(rng: random.Random) -> Row:
    one, other = _product(rng)
    return {"ID": f"made-up-{one}-{other}", "Problem": f"Find ${one} \\cdot {other}$.", "Answer": one * other}


def _cnmo(rng: random.Random) -> Row:
    one, other = _product(rng)
    return {"question": f"What is $\\frac{{{one}}}{{{other}}}$?", "answer": f"$\\frac{{{one}}}{{{other}}}$"}


def _cnmo_part(language: str, folder: str) -> Part:
    columns = ("question", "answer")
    raw = RawSet("opencompass/LiveMathBench", columns, _cnmo, splits=("test",), subset=f"v202412_CNMO_{language}")
    return Part(f"opencompass/cnmo2024_{folder}", raw, folder)


AIME = RawSet("Maxwell-Jia/AIME_2024", ("Problem", "Answer"), _aime, splits=("train",))
AIME_2024 = Task("math", (Part("Maxwell-Jia/AIME_2024", AIME),), problem_of("Problem", "Answer"), compute_score)
CNMO_2024 = Task(
    "math", (_cnmo_part("en", "en"), _cnmo_part("cn", "zh")), problem_of("question", "answer"), compute_score
)
