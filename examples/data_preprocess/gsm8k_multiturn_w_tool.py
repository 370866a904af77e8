"""Write GSM8K as parquet files for a model that calls a tool; each row has the arguments that create its tool.

Read from the hub or from a folder with the same files; without a network, generate problems:

    python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_save_dir ~/data/gsm8k
    python examples/data_preprocess/gsm8k_multiturn_w_tool.py --local_dataset_path ~/raw/gsm8k
    python examples/data_preprocess/gsm8k_multiturn_w_tool.py --source synthetic --local_save_dir ~/data/gsm8k
"""

import sys

from verl.utils.dataset.preparation import build_parser, prepare
from verl.utils.dataset.raw_sets import GSM8K, gsm8k_tool_row


def main() -> int:
    """Write the parquet files; return the exit code."""
    return prepare(build_parser(__doc__, "gsm8k").parse_args(), GSM8K, gsm8k_tool_row)


if __name__ == "__main__":
    sys.exit(main())
