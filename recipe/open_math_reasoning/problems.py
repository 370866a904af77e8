"""The prompt of a problem, and generated problems, shared by training and evaluation."""

import random

INSTRUCTION = r"Solve the problem step by step, and put the final answer in \boxed{}."
MOST = 3


def prompt_of(problem: str) -> str:
    """Return the prompt of a problem."""
    return f"{problem}\n{INSTRUCTION}"


def made_up_sum(rng: random.Random) -> tuple[str, str]:
    """Generate a problem and its answer, from a set of sums so small that a small model can learn all of them."""
    one = rng.randint(1, MOST)
    other = rng.randint(1, MOST)
    return f"Find ${one} + {other}$.", str(one + other)
