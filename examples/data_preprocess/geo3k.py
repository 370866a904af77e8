"""Write Geometry3K, or synthetic figures, as parquet files for reinforcement learning with images.

Read from the hub or from a folder with the same files:

    python examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
    python examples/data_preprocess/geo3k.py --local_dataset_path ~/raw/geometry3k

Without a network, draw figures and ask for their area; this also writes answers for a supervised warm-up:

    python examples/data_preprocess/geo3k.py --synthetic --local_save_dir ~/data/figures
"""

import random
import sys
from typing import Any

import datasets

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import build_parser, prepare, write_tables
from verl.utils.dataset.raw_sets import GEOMETRY3K

INSTRUCTION = (
    "You FIRST think about the reasoning process as an internal monologue and then provide the final answer. "
    "The reasoning process MUST BE enclosed within <think> </think> tags. "
    r"The final answer MUST BE put in \boxed{}."
)

NUM_TRAIN = 1024
NUM_TEST = 128
NUM_SFT = 2048


def rl_row(problem: str, answer: str, images: list[Any], split: str, index: int, instruction: str) -> Row:
    """Return one prompt with its ground truth; ``problem`` contains ``<image>`` once per image."""
    return {
        "data_source": GEOMETRY3K.hub_name,
        "prompt": [{"role": "user", "content": f"{problem} {instruction}".strip()}],
        "images": images,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {"split": split, "index": index, "answer": answer, "question": problem},
    }


def published_row(split: str, example: Row, index: int) -> Row:
    """Return a published problem as a prompt."""
    return rl_row(example["problem"], example["answer"], example["images"], split, index, INSTRUCTION)


def synthetic_tables(seed: int = 0) -> dict[str, datasets.Dataset]:
    """Generate prompts (train, test) and conversations for a supervised warm-up (sft_train, sft_test)."""
    rng = random.Random(seed)

    def row(split: str, index: int) -> Row:
        drawn = GEOMETRY3K.make_up(rng)
        return rl_row(drawn["problem"], drawn["answer"], drawn["images"], split, index, instruction="")

    def conversation(split: str, index: int) -> Row:
        made = row(split, index)
        answer = {"role": "assistant", "content": rf"\boxed{{{made['reward_model']['ground_truth']}}}"}
        return {"messages": [*made["prompt"], answer], "images": made["images"]}

    sizes = {"train": NUM_TRAIN, "test": NUM_TEST, "sft_train": NUM_SFT, "sft_test": NUM_TEST}
    return {
        split: datasets.Dataset.from_list(
            [(conversation if split.startswith("sft") else row)(split, index) for index in range(size)]
        )
        for split, size in sizes.items()
    }


def main() -> int:
    """Write the parquet files; return the exit code."""
    parser = build_parser(__doc__, "geo3k")
    parser.add_argument(
        "--synthetic", action="store_const", const="synthetic", dest="source", help="the same as --source synthetic"
    )
    args = parser.parse_args()
    if args.source == "synthetic":
        return write_tables(lambda: synthetic_tables(args.seed), args)
    return prepare(args, GEOMETRY3K, published_row)


if __name__ == "__main__":
    sys.exit(main())
