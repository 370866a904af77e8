"""The command line of scripts that write a tiny model and the data of a task for it."""

import argparse
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd

Row = Mapping[str, Any]


def run(description: str | None, write: Callable[[str, int], None]) -> int:
    """Call ``write`` with the output folder and the seed of the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--save-dir", required=True, help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights and of the rows (default: 0)")
    args = parser.parse_args()
    folder = os.path.expanduser(args.save_dir)
    try:
        os.makedirs(os.path.join(folder, "data"), exist_ok=True)
        write(folder, args.seed)
    except OSError as error:
        sys.stderr.write(f"error: --save-dir={args.save_dir}: {error}: write another folder\n")
        return 2
    return 0


def write_tables(folder: str, tables: Mapping[str, Sequence[Row]]) -> None:
    """Write each table to a parquet file of its name in the folder ``data``."""
    for name, rows in tables.items():
        pd.DataFrame(rows).to_parquet(os.path.join(folder, "data", f"{name}.parquet"))
