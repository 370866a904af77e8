"""Write Geometry3K as parquet files for a vision-language model that calls a tool.

Read from the hub or from a folder with the same files; without a network, draw figures:

    python examples/data_preprocess/geo3k_multiturn_w_tool.py --local_save_dir ~/data/geo3k_multiturn_w_tool
    python examples/data_preprocess/geo3k_multiturn_w_tool.py --local_dataset_path ~/raw/geo3k_multiturn_w_tool
    python examples/data_preprocess/geo3k_multiturn_w_tool.py --source synthetic
"""

import sys

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import build_parser, prepare
from verl.utils.dataset.raw_sets import GEOMETRY3K

TOOL = "calc_geo3k_reward"
SYSTEM = (
    "Solve the problem about the figure. Reason inside <think> </think> before you answer. When you have a result, "
    f"call the tool `{TOOL}` with it at least once, and correct your solution if the score is low. Put the final "
    r"answer in \boxed{}."
)


def row(split: str, example: Row, index: int) -> Row:
    """Return a problem with its figure, and the arguments with which its tool is created."""
    problem = example["problem"]
    answer = example["answer"]
    return {
        "data_source": GEOMETRY3K.hub_name,
        "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}],
        "images": example["images"],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": {
            "split": split,
            "index": index,
            "answer": answer,
            "question": problem,
            "need_tools_kwargs": True,
            "tools_kwargs": {TOOL: {"create_kwargs": {"ground_truth": answer}}},
        },
    }


def main() -> int:
    """Write the parquet files; return the exit code."""
    return prepare(build_parser(__doc__, "geo3k_multiturn_w_tool").parse_args(), GEOMETRY3K, row)


if __name__ == "__main__":
    sys.exit(main())
