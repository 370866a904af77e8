"""Write AIME 2024 and AIME 2025 as one file of prompts for the evaluation.

Read from the hub or from a folder that holds ``aime24`` and ``aime25``; without a network, generate sums:

    python -m recipe.open_math_reasoning.prepare_eval_dataset
    python -m recipe.open_math_reasoning.prepare_eval_dataset --local_dataset_path ~/raw
    python -m recipe.open_math_reasoning.prepare_eval_dataset --source synthetic
"""

import argparse
import os
import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet, build_parser, rows_of, write_tables
from verl.utils.import_utils import dotted_name
from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

if not __package__:  # started by its path
    __package__ = dotted_name(os.path.dirname(__file__))

from .problems import made_up_sum, prompt_of

SPLIT = "test"
FILE = "eval_dataset"


def made_up_solution(rng: random.Random) -> Row:
    """Generate a sum in the format of AIME 2024, whose answer is the ``\\boxed`` of its solution."""
    problem, answer = made_up_sum(rng)
    return {"problem": problem, "solution": f"\\boxed{{{answer}}}"}


def made_up_answer(rng: random.Random) -> Row:
    """Generate a sum in the format of AIME 2025."""
    problem, answer = made_up_sum(rng)
    return {"problem": problem, "answer": answer}


RAW = {
    "aime24": RawSet("math-ai/aime24", ("problem", "solution"), made_up_solution, splits=(SPLIT,)),
    "aime25": RawSet("math-ai/aime25", ("problem", "answer"), made_up_answer, splits=(SPLIT,)),
}


def answer_of(example: Row) -> str:
    """Return the answer of a row; without one, the ``\\boxed`` answer of its solution.

    Raises: ValueError if the row has neither.
    """
    if example.get("answer") is not None:
        return str(example["answer"])
    boxed = last_boxed_only_string(example["solution"])
    if boxed is None:
        raise ValueError(f"no boxed answer in the solution {example['solution']!r}")
    return remove_boxed(boxed)


def row(data_source: str, example: Row, index: int) -> Row:
    """Return one problem as a prompt with its answer."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt_of(example["problem"])}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer_of(example)},
        "extra_info": {"split": SPLIT, "index": index},
    }


def rows(args: argparse.Namespace) -> Iterator[Row]:
    """Yield the problems of both years."""
    for name, raw in RAW.items():
        folder = args.local_dataset_path and str(Path(args.local_dataset_path) / name)
        found = raw.read(argparse.Namespace(**vars(args) | {"local_dataset_path": folder}))
        yield from rows_of(found[SPLIT], SPLIT, partial(row, name))


def main() -> int:
    """Write the file; return the exit code."""
    args = build_parser(__doc__, "open_math_reasoning").parse_args()
    return write_tables(lambda: {FILE: rows(args)}, args)


if __name__ == "__main__":
    sys.exit(main())
