"""Write AIME-2024 as a parquet file for a model that may run Python in a tool.

Read from the hub or from a folder with the same files; without a network, generate problems:

    python examples/data_preprocess/aime2024_multiturn_w_tool.py --local_save_dir ~/data/retool_aime2024
    python examples/data_preprocess/aime2024_multiturn_w_tool.py --local_dataset_path ~/raw/retool_aime2024
    python examples/data_preprocess/aime2024_multiturn_w_tool.py --source synthetic
"""

import sys

from verl.utils.dataset.preparation import build_parser, prepare
from verl.utils.dataset.raw_sets import competition_set, with_code_interpreter

RAW = competition_set("BytedTsinghua-SIA/AIME-2024")


def main() -> int:
    """Write the parquet file; return the exit code."""
    return prepare(build_parser(__doc__, "retool_aime2024").parse_args(), RAW, with_code_interpreter)


if __name__ == "__main__":
    sys.exit(main())
