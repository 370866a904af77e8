"""Write GSM8K as parquet files for the agent loop ``tool_agent``, which calls a tool.

Read from the hub or from a folder with the same files; without a network, generate problems:

    python examples/data_preprocess/gsm8k_tool_agent_loop.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k_tool_agent_loop.py --local_dataset_path ~/raw/gsm8k
    python examples/data_preprocess/gsm8k_tool_agent_loop.py --source synthetic --local_save_dir ~/data/gsm8k
"""

import sys

from verl.utils.dataset.files import Row
from verl.utils.dataset.preparation import build_parser, prepare
from verl.utils.dataset.raw_sets import GSM8K, gsm8k_tool_row


def row(split: str, example: Row, index: int) -> Row:
    """Return a problem with its tool and the name of the agent loop."""
    return {"agent_name": "tool_agent", **gsm8k_tool_row(split, example, index)}


def main() -> int:
    """Write the parquet files; return the exit code."""
    return prepare(build_parser(__doc__, "gsm8k").parse_args(), GSM8K, row)


if __name__ == "__main__":
    sys.exit(main())
