r"""Write MATH as parquet files for reinforcement learning; the ground truth is the boxed answer of the solution.

Read the hub, or a folder with the same files (parquet or JSON, ``train`` and ``test``):

    python examples/data_preprocess/math_dataset.py --local_save_dir ~/data/math
    python examples/data_preprocess/math_dataset.py --local_dataset_path ~/raw/MATH-lighteval
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
    r"""Return the content of a solution's last ``\boxed``.

    Raises: ValueError if there is none.
    """
    boxed = last_boxed_only_string(solution)
    if boxed is None:
        raise ValueError(f"no boxed answer in the solution {solution!r}")
    return remove_boxed(boxed)


def row(example: dict[str, Any], split: str, index: int) -> dict[str, Any]:
    """Return one problem as a prompt with its ground truth."""
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": f"{example['problem']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": extract_solution(example["solution"])},
        "extra_info": {"split": split, "index": index},
    }


def tables(local_dataset_path: str | None) -> dict[str, list[dict[str, Any]]]:
    """Read both splits from the hub or a local copy."""
    raw = datasets.load_dataset(os.path.expanduser(local_dataset_path) if local_dataset_path else DATA_SOURCE)
    return {split: [row(each, split, i) for i, each in enumerate(raw[split])] for split in ("train", "test")}


def main() -> None:
    """Write the parquet files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", help="folder with the raw data set, instead of the hub")
    parser.add_argument("--local_save_dir", default="~/data/math", help="output folder (default: ~/data/math)")
    parser.add_argument("--local_dir", help="deprecated: use --local_save_dir")
    parser.add_argument("--hdfs_dir", help="also copy the files to this HDFS folder")
    args = parser.parse_args()
    if args.local_dir is not None:
        print("--local_dir is deprecated: use --local_save_dir", file=sys.stderr)
    save_dir = os.path.expanduser(args.local_dir or args.local_save_dir)
    os.makedirs(save_dir, exist_ok=True)
    for name, rows in tables(args.local_dataset_path).items():
        path = os.path.join(save_dir, f"{name}.parquet")
        datasets.Dataset.from_list(rows).to_parquet(path)
        print(f"wrote {len(rows)} rows to {path}")
    if args.hdfs_dir is not None:
        from verl.utils import hdfs_io

        hdfs_io.makedirs(args.hdfs_dir)
        hdfs_io.copy(save_dir, args.hdfs_dir)


if __name__ == "__main__":
    main()
