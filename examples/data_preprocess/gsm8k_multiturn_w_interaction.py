"""Write GSM8K as parquet files for conversations in which the interaction ``gsm8k`` replies until the result is right.

Read from the hub or from a folder with the same files; without a network, generate problems:

    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --local_dataset_path ~/raw/gsm8k
    python examples/data_preprocess/gsm8k_multiturn_w_interaction.py --source synthetic --local_save_dir ~/data/gsm8k
"""

import sys

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import build_parser, prepare
from verl.utils.dataset.raw_sets import GSM8K, gsm8k_row

SYSTEM = (
    "Solve the problem step by step. You are told whether your answer is right; if it is not, look for the mistake and "
    'solve it again. End each solution with the answer in the form "#### <number>".'
)
INSTRUCTION = 'Think step by step and end with the answer after "####".'


def row(split: str, example: Row, index: int) -> Row:
    """Return a problem, and the arguments with which its interaction starts."""
    made = gsm8k_row(split, example, index, SYSTEM, INSTRUCTION)
    made["extra_info"]["interaction_kwargs"] = {
        "name": "gsm8k",
        "query": example["question"],
        "ground_truth": made["reward_model"]["ground_truth"],
    }
    return made


def main() -> int:
    """Write the parquet files; return the exit code."""
    return prepare(build_parser(__doc__, "gsm8k").parse_args(), GSM8K, row)


if __name__ == "__main__":
    sys.exit(main())
