"""What the scripts of ``examples/data_preprocess`` share: arguments, reading of a raw data set, and writing."""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import datasets

from verl.base_config import one_line
from verl.utils import hdfs_io
from verl.utils.command_line import OneLineParser
from verl.utils.dataset.files import DataError, Row
from verl.utils.observe.console import get_console

SPLITS = ("train", "test")


def build_parser(description: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser of the arguments that every script takes; ``name`` is the folder in ``~/data``."""
    parser = OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--local_dataset_path", help="folder with the raw data set, instead of the hub")
    parser.add_argument("--local_save_dir", default=f"~/data/{name}", help=f"output folder (default: ~/data/{name})")
    parser.add_argument("--local_dir", help="deprecated: use --local_save_dir")
    parser.add_argument("--hdfs_dir", help="also copy the files to this HDFS folder")
    return parser


def read_raw(hub_name: str, folder: str | None, columns: Collection[str], subset: str | None = None) -> Any:
    """Return the splits of a data set of the hub, or of a local folder with the same files.

    Raises: DataError if it cannot be read, or lacks a split or one of the ``columns``.
    """
    source = hub_name if folder is None else os.path.expanduser(folder)
    where = f"the data set {hub_name} of the hub" if folder is None else f"--local_dataset_path={folder}"
    if folder is not None and not os.path.isdir(source):
        raise DataError(f"{where}: no such folder: write the folder that holds the files of {hub_name}")
    try:
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        raw = datasets.load_dataset(source, subset)
    except Exception as error:  # the library raises many classes, for files and for the network
        hint = "download it and name its folder in --local_dataset_path" if folder is None else "download it again"
        reason = one_line(f"{type(error).__name__}: {error}")
        raise DataError(f"{where}: cannot be read: {reason}: {hint}") from error
    for split in SPLITS:
        if split not in raw:
            raise DataError(f"{where}: has no split {split!r}, it has {sorted(raw)}: write the files of {hub_name}")
        there = raw[split].column_names
        missing = [name for name in columns if name not in there]
        if missing:
            raise DataError(f"{where}, split {split!r}: has no column {missing[0]!r}, it has {there}: add or rename it")
    return raw


def rows_of(rows: Any, split: str, make: Callable[[Row, int], Row]) -> Iterator[Row]:
    """Yield what ``make`` makes of each row of a split and its index.

    Raises: DataError naming the row that it refuses.
    """
    for index, row in enumerate(rows):
        try:
            yield make(row, index)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"split {split!r}, row {index}: {one_line(str(error))}: correct or remove the row"
            ) from error


def write_tables(make_tables: Callable[[], Mapping[str, Any]], args: argparse.Namespace) -> int:
    """Write tables, or lists of rows, as ``<name>.parquet``; return the exit code of the script."""
    if args.local_dir is not None:
        sys.stderr.write("--local_dir is deprecated: use --local_save_dir\n")
    save_dir = os.path.expanduser(args.local_dir or args.local_save_dir)
    try:
        os.makedirs(save_dir, exist_ok=True)
        for name, rows in make_tables().items():
            path = os.path.join(save_dir, f"{name}.parquet")
            (datasets.Dataset.from_list(rows) if isinstance(rows, list) else rows).to_parquet(path)
            get_console().info("wrote %d rows to %s", len(rows), path)
        if args.hdfs_dir is not None:
            hdfs_io.makedirs(args.hdfs_dir)
            hdfs_io.copy(save_dir, args.hdfs_dir)
    except (DataError, hdfs_io.HdfsError) as error:
        sys.stderr.write(f"error: {one_line(str(error), 1000)}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: --local_save_dir={save_dir}: {one_line(str(error))}: write another folder\n")
        return 2
    return 0
