"""Shared code of training and evaluation: the prompt of a problem, and generated problems."""

import random

INSTRUCTION = r"Solve the problem step by step, and put the final answer in \boxed{}."
MOST = 3


def prompt_of(problem: str) -> str:
    """Return the prompt of a problem."""
    return f"{problem}\n{INSTRUCTION}"


def made_up_sum(rng: random.Random) -> tuple[str, str]:
    """Return a problem and its answer: one of a few sums, so that a small model can learn them all."""
    one = rng.randint(1, MOST)
    other = rng.randint(1, MOST)
    return f"Find ${one} + {other}$.", str(one + other)
