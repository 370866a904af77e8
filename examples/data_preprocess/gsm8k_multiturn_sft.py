"""Write GSM8K as conversations for supervised fine-tuning, in the column ``messages``.

Read from the hub or from a folder with the same files; without a network, generate problems:

    python examples/data_preprocess/gsm8k_multiturn_sft.py --local_save_dir ~/data/gsm8k_sft
    python examples/data_preprocess/gsm8k_multiturn_sft.py --local_dataset_path ~/raw/gsm8k_sft
    python examples/data_preprocess/gsm8k_multiturn_sft.py --source synthetic --local_save_dir ~/data/gsm8k_sft
"""

import sys

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import build_parser, prepare
from verl.utils.dataset.raw_sets import GSM8K, final_number

INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'


def row(split: str, example: Row, index: int) -> Row:
    """Return a problem and its published solution, which must hold a final number."""
    final_number(example["answer"])
    return {
        "messages": [
            {"role": "user", "content": f"{example['question']} {INSTRUCTION}"},
            {"role": "assistant", "content": example["answer"]},
        ]
    }


def main() -> int:
    """Write the parquet files; return the exit code."""
    return prepare(build_parser(__doc__, "gsm8k_sft").parse_args(), GSM8K, row)


if __name__ == "__main__":
    sys.exit(main())
