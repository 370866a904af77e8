"""Write the worked solutions of OpenMathReasoning as conversations for supervised fine-tuning.

Only problems whose answer was extracted from their solution are kept.

Read from the hub or from a folder with the same files; without a network, generate sums:

    python -m recipe.open_math_reasoning.prepare_nvidia-OpenMathReasoning_sft
    python -m recipe.open_math_reasoning.prepare_nvidia-OpenMathReasoning_sft --local_dataset_path raw
    python -m recipe.open_math_reasoning.prepare_nvidia-OpenMathReasoning_sft --source synthetic
"""

import os
import random
import sys

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import RawSet, build_parser, rows_of, write_tables
from verl.utils.import_utils import dotted_name

if not __package__:  # started by its path
    __package__ = dotted_name(os.path.dirname(__file__))

from .problems import made_up_sum, prompt_of

SPLIT = "cot"
HAS_ANSWER = "has_answer_extracted"
FILE = "cot_dataset"


def made_up(rng: random.Random) -> Row:
    """Generate a sum with its solution."""
    problem, answer = made_up_sum(rng)
    solution = f"The sum is \\boxed{{{answer}}}."
    return {"problem": problem, "generated_solution": solution, "problem_type": HAS_ANSWER}


RAW = RawSet("nvidia/OpenMathReasoning", ("problem", "generated_solution", "problem_type"), made_up, splits=(SPLIT,))


def row(example: Row, index: int) -> Row | None:
    """Return a problem and its solution as a conversation; None for a problem without an answer."""
    if example["problem_type"] != HAS_ANSWER:
        return None
    answer = {"role": "assistant", "content": example["generated_solution"]}
    return {"messages": [{"role": "user", "content": prompt_of(example["problem"])}, answer]}


def main() -> int:
    """Write the file; return the exit code."""
    args = build_parser(__doc__, "open_math_reasoning").parse_args()
    return write_tables(lambda: {FILE: rows_of(RAW.read(args)[SPLIT], SPLIT, row)}, args)


if __name__ == "__main__":
    sys.exit(main())
