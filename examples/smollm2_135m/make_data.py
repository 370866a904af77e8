"""Write sums of two numbers below 50, asked in plain words, as parquet files.

    python examples/smollm2_135m/make_data.py --save-dir ~/data/plain_sums

``train.parquet`` and ``test.parquet`` hold prompts for reinforcement learning, ``sft_train.parquet`` and
``sft_test.parquet`` the same questions with answers. No question of ``test`` occurs in ``train``.
"""

import argparse
import os
import random
import sys
from itertools import product
from typing import Any

import pandas as pd

BELOW = 50
NUM_TEST = 64

Row = dict[str, Any]


def question(x: int, y: int) -> dict[str, str]:
    """Return the message that asks for a sum."""
    return {"role": "user", "content": f"What is {x} + {y}? Answer with the number only."}


def prompt_row(split: str, index: int, x: int, y: int) -> Row:
    """Return a question with its ground truth."""
    return {
        "data_source": "plain_sums",
        "prompt": [question(x, y)],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(x + y)},
        "extra_info": {"split": split, "index": index},
    }


def answered_row(x: int, y: int) -> Row:
    """Return a conversation with the right answer."""
    return {"messages": [question(x, y), {"role": "assistant", "content": str(x + y)}]}


def tables(seed: int) -> dict[str, list[Row]]:
    """Return the rows of each output file by its name."""
    pairs = list(product(range(BELOW), repeat=2))
    random.Random(seed).shuffle(pairs)
    splits = {"test": pairs[:NUM_TEST], "train": pairs[NUM_TEST:]}
    made = {name: [prompt_row(name, i, *pair) for i, pair in enumerate(split)] for name, split in splits.items()}
    return made | {f"sft_{name}": [answered_row(*pair) for pair in split] for name, split in splits.items()}


def main() -> int:
    """Write the files; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", required=True, help="output folder")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of the order of the rows and of the split (default: 0)"
    )
    args = parser.parse_args()
    folder = os.path.expanduser(args.save_dir)
    try:
        os.makedirs(folder, exist_ok=True)
        for name, rows in tables(args.seed).items():
            pd.DataFrame(rows).to_parquet(os.path.join(folder, f"{name}.parquet"))
    except OSError as error:
        sys.stderr.write(f"error: --save-dir={args.save_dir}: {error}: write another folder\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
