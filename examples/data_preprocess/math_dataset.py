r"""Write MATH as parquet files for reinforcement learning: the ground truth is what the last ``\boxed`` holds.

From the hub, or from a folder that holds the same files:

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
    python examples/data_preprocess/math_dataset.py --local_dataset_path ~/raw/math
"""

import argparse
import os
import sys
from typing import Any

import datasets

from verl.utils.reward_score.math_reward import last_boxed_only_string, remove_boxed

DATA_SOURCE = "DigitalLearningGmbH/MATH-lighteval"
INSTRUCTION = r"Let's think step by step and output the final answer within \boxed{}."


def extract_solution(solution: str) -> str:
    r"""Return the content of the last ``\boxed``.

    Raises: ValueError when there is none.
    """
    boxed = last_boxed_only_string(solution)
    if boxed is None:
        raise ValueError(f"no boxed answer in the solution {solution!r}")
    return remove_boxed(boxed)


def rl_row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one problem as a prompt with what its scorer needs."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{example['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": extract_solution(example["solution"])},
        "extra_info": {"split": split, "index": index},
    }


def main() -> None:
    """Write what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", help="folder with the raw data set, in place of the hub")
    parser.add_argument("--local_save_dir", default="~/data/math", help="default: ~/data/math")
    parser.add_argument("--local_dir", help="deprecated: write --local_save_dir")
    parser.add_argument("--hdfs_dir", help="copy the files there too")
    args = parser.parse_args()
    if args.local_dir is not None:
        print("--local_dir is deprecated: write --local_save_dir", file=sys.stderr)
    save_dir = os.path.expanduser(args.local_dir or args.local_save_dir)
    os.makedirs(save_dir, exist_ok=True)
    raw = datasets.load_dataset(os.path.expanduser(args.local_dataset_path) if args.local_dataset_path else DATA_SOURCE)
    for split in ("train", "test"):
        rows = [rl_row(example, split, index) for index, example in enumerate(raw[split])]
        path = os.path.join(save_dir, f"{split}.parquet")
        datasets.Dataset.from_list(rows).to_parquet(path)
        print(f"wrote {len(rows)} rows to {path}")
    if args.hdfs_dir is not None:
        from verl.utils import hdfs_io

        hdfs_io.makedirs(args.hdfs_dir)
        hdfs_io.copy(save_dir, args.hdfs_dir)


if __name__ == "__main__":
    main()
