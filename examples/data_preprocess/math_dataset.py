r"""Write MATH as parquet files for reinforcement learning; the ground truth is the boxed answer of the solution.

Read the hub, or a folder with the same files (parquet or JSON, ``train`` and ``test``):

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
    python examples/data_preprocess/math_dataset.py --local_dataset_path ~/raw/MATH-lighteval
"""

import sys
from functools import partial

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import SPLITS, build_parser, read_raw, rows_of, write_tables
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


def tables(local_dataset_path: str | None) -> dict[str, list[Row]]:
    """Read both splits from the hub or a local copy."""
    raw = read_raw(DATA_SOURCE, local_dataset_path, ("problem", "solution"))
    return {split: list(rows_of(raw[split], split, partial(row, split))) for split in SPLITS}


def main() -> int:
    """Write the parquet files; return the exit code."""
    args = build_parser(__doc__, "math").parse_args()
    return write_tables(lambda: tables(args.local_dataset_path), args)


if __name__ == "__main__":
    sys.exit(main())
