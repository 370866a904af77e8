r"""Write MATH as parquet files for reinforcement learning; the ground truth is the boxed answer of the solution.

Read from the hub or from a folder with the same files (parquet or JSON, ``train`` and ``test``):

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
    python examples/data_preprocess/math_dataset.py --local_dataset_path ~/raw/MATH-lighteval

Without a network, generate sums of fractions:

    python examples/data_preprocess/math_dataset.py --source synthetic --local_save_dir ~/data/fractions
"""

import random
import sys
from fractions import Fraction

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet, build_parser, prepare
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def extract_solution(solution: str) -> str:
    r"""Return the content of a solution's last ``\boxed``.

    Raises: ValueError if there is none.
    """
    boxed = last_boxed_only_string(solution)
    if boxed is None:
        raise ValueError(f"no boxed answer in the solution {solution!r}")
    return remove_boxed(boxed)


def row(split: str, example: Row, index: int) -> Row:
    """Return one problem as a prompt with its ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{example['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": extract_solution(example["solution"])},
        "extra_info": {"split": split, "index": index},
    }


def made_up(rng: random.Random) -> Row:
    """Generate a sum of two fractions, with the columns of MATH."""
    first, second = (Fraction(rng.randint(1, 9), rng.randint(2, 9)) for _ in range(2))
    problem = f"What is ${latex(first)} + {latex(second)}$ in lowest terms?"
    return {
        "problem": problem,
        "level": "Level 1",
        "type": "Prealgebra",
        "solution": rf"Over a common denominator, the sum is $\boxed{{{latex(first + second)}}}$.",
    }


def latex(number: Fraction) -> str:
    """Return a fraction, or a whole number, as LaTeX."""
    whole = number.denominator == 1
    return str(number.numerator) if whole else rf"\frac{{{number.numerator}}}{{{number.denominator}}}"


RAW = RawSet(DATA_SOURCE, ("problem", "solution"), made_up)


def main() -> int:
    """Write the parquet files; return the exit code."""
    return prepare(build_parser(__doc__, "math").parse_args(), RAW, row)


if __name__ == "__main__":
    sys.exit(main())
