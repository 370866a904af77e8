"""Shared code of the scripts in ``examples/data_preprocess``: arguments, reading of a raw data set, and writing."""

import argparse
import os
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import TypeAlias

import datasets

from verl.base_config import one_line
from verl.errors import DataError, WrongInput
from verl.utils import hdfs_io
from verl.utils.command_line import OneLineParser
from verl.utils.dataset.files import Row
from verl.utils.failures import replacing_errors
from verl.utils.observe.console import get_console

SPLITS = ("train", "test")


SYNTHETIC_ROWS = {"train": 64}
"""Split -> rows that a script makes up; 16 for the others."""

_CHUNK_ROWS = 20_000

Rows: TypeAlias = "datasets.Dataset | Iterable[Row]"
"""The rows of a split."""
MakeRow = Callable[[str, Row, int], Row | None]
"""(split, raw row, index) -> row of the file, or None to leave it out."""


def output_parser(description: str | None, name: str, is_local_dir_deprecated: bool = True) -> OneLineParser:
    """Return a parser of the output arguments; ``name`` is the folder in ``~/data``."""
    parser = OneLineParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    names = ["--local_save_dir"] if is_local_dir_deprecated else ["--local_dir", "--local_save_dir"]
    add(*names, dest="local_save_dir", default=f"~/data/{name}", help=f"output folder (default: ~/data/{name})")
    if is_local_dir_deprecated:
        add("--local_dir", help="deprecated: use --local_save_dir")
    add("--hdfs_dir", help="also copy the files to this HDFS folder")
    return parser


def build_parser(description: str | None, name: str, is_local_dir_deprecated: bool = True) -> OneLineParser:
    """Return a parser of the arguments of a script that reads a raw data set."""
    parser = output_parser(description, name, is_local_dir_deprecated)
    add = parser.add_argument
    add("--source", choices=("hub", "synthetic"), default="hub", help="published or made-up rows (default: hub)")
    add("--seed", type=int, default=0, help="seed of the made-up rows (default: 0)")
    add("--local_dataset_path", help="folder with the raw data set, instead of the hub")
    return parser


@dataclass(frozen=True)
class RawSet:
    """A published data set, and how to make up rows like its own.

    ``make_up`` returns a raw row. ``columns`` are those that a script reads. ``image_column`` holds lists of images,
    which stay encoded. With ``has_split_files`` each split is the file ``<split>.parquet``, read alone because its
    columns differ from those of the others. ``hub_files`` names the files of JSON lines of a hub repository that also
    has a loading script, which the library no longer runs.
    """

    hub_name: str
    columns: tuple[str, ...]
    make_up: Callable[[random.Random], Row]
    splits: tuple[str, ...] = SPLITS
    subset: str | None = None
    image_column: str | None = None
    has_split_files: bool = False
    hub_files: str | None = None

    def read(self, args: argparse.Namespace) -> Mapping[str, Rows]:
        """Return the raw rows of each split: of the hub, of a local folder with the same files, or made up.

        Raises: DataError if they cannot be read, or lack a split or one of the columns.
        """
        if args.source == "synthetic":
            rng = random.Random(args.seed)
            return {split: [self.make_up(rng) for _ in range(SYNTHETIC_ROWS.get(split, 16))] for split in self.splits}
        raw = self._load(args.local_dataset_path)
        encoded = datasets.List(datasets.Image(decode=False))
        return {
            split: raw[split].cast_column(self.image_column, encoded) if self.image_column else raw[split]
            for split in self.splits
        }

    def _load(self, folder: str | None) -> Mapping[str, datasets.Dataset]:
        source = self.hub_name if folder is None else os.path.expanduser(folder)
        where = f"the data set {self.hub_name} of the hub" if folder is None else f"--local_dataset_path={folder}"
        if folder is not None and not os.path.isdir(source):
            raise DataError(f"{where}: no such folder: write the folder that holds the files of {self.hub_name}")

        def named(error: Exception) -> DataError:
            hint = "download it and name its folder in --local_dataset_path" if folder is None else "download it again"
            cause = error.__cause__ if isinstance(error, datasets.exceptions.DatasetGenerationError) else None
            reason = one_line(f"{type(cause or error).__name__}: {cause or error}").rstrip(".")
            return DataError(f"{where}: cannot be read: {reason}: {hint}")

        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        with replacing_errors(named), nullcontext() if folder is None else _no_log_of_the_library():
            raw = self._load_splits(source, folder)
        for split in self.splits:
            if split not in raw:
                raise DataError(
                    f"{where}: has no split {split!r}, it has {sorted(raw)}: write the files of {self.hub_name}"
                )
        for split in self.splits:
            there = raw[split].column_names
            missing = [name for name in self.columns if name not in there]
            if missing:
                raise DataError(
                    f"{where}, split {split!r}: has no column {missing[0]!r}, it has {there}: add or rename it"
                )
        return raw

    def _load_splits(self, source: str, folder: str | None) -> Mapping[str, datasets.Dataset]:
        if self.has_split_files:
            return {name: self._load_file(source, name) for name in self.splits}
        if folder is None and self.hub_files is not None:
            files = f"hf://datasets/{source}/{self.hub_files}"
            return datasets.load_dataset("json", data_files=dict.fromkeys(self.splits, files))
        return datasets.load_dataset(source, self._subset_in(folder))

    def _subset_in(self, folder: str | None) -> str | None:
        """Return the subset, unless a local folder has only its files."""
        if folder is None or self.subset is None:
            return self.subset
        has_subset = self.subset in datasets.get_dataset_config_names(os.path.expanduser(folder))
        return self.subset if has_subset else None

    def _load_file(self, source: str, split: str) -> datasets.Dataset:
        return datasets.load_dataset(source, data_files={split: f"{split}.parquet"}, split=split)


@contextmanager
def _no_log_of_the_library() -> Iterator[None]:
    """Silence the datasets library when it cannot read a file: it also raises the reason, which is shown."""
    before = datasets.logging.get_verbosity()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    try:
        yield
    finally:
        datasets.logging.set_verbosity(before)


def rows_of(rows: Rows, split: str, make: Callable[[Row, int], Row | None]) -> Iterator[Row]:
    """Yield ``make(row, index)`` for each row of a split; None where ``make`` drops the row.

    Raises: DataError naming the row that it refuses.
    """
    for index, row in enumerate(rows):
        try:
            made = make(row, index)
        except (ValueError, TypeError) as error:
            raise DataError(
                f"split {split!r}, row {index}: {one_line(str(error))}: correct or remove the row"
            ) from error
        if made is not None:
            yield made


def prepare(args: argparse.Namespace, raw: RawSet, make_row: MakeRow) -> int:
    """Write each split of a raw data set, row by row; return the exit code of the script."""

    def tables() -> dict[str, Iterator[Row]]:
        return {split: rows_of(rows, split, partial(make_row, split)) for split, rows in raw.read(args).items()}

    return write_tables(tables, args)


def write_tables(make_tables: Callable[[], Mapping[str, Rows]], args: argparse.Namespace) -> int:
    """Write tables, or iterables of rows, as ``<name>.parquet``; return the exit code of the script."""
    deprecated = getattr(args, "local_dir", None)
    if deprecated is not None:
        sys.stderr.write("--local_dir is deprecated: use --local_save_dir\n")
    save_dir = os.path.expanduser(deprecated or args.local_save_dir)
    try:
        os.makedirs(save_dir, exist_ok=True)
        for name, table in as_tables(make_tables()).items():
            path = os.path.join(save_dir, f"{name}.parquet")
            table.to_parquet(path)
            get_console().info("wrote %d rows to %s", len(table), path)
        if args.hdfs_dir is not None:
            hdfs_io.makedirs(args.hdfs_dir)
            hdfs_io.copy(save_dir, args.hdfs_dir)
    except (WrongInput, hdfs_io.HdfsError) as error:
        sys.stderr.write(f"error: {one_line(str(error), 1000)}\n")
        return 2
    except OSError as error:
        sys.stderr.write(f"error: --local_save_dir={save_dir}: {one_line(str(error))}: write another folder\n")
        return 2
    return 0


def as_tables(made: Mapping[str, Rows]) -> dict[str, datasets.Dataset]:
    """Return all rows as tables; one without rows gets the columns of the first.

    Raises: DataError if no table has a row, or if the rows of a table differ in their columns.
    """
    tables: dict[str, datasets.Dataset] = {}
    empty = []
    for name, rows in made.items():
        parts = [rows] if isinstance(rows, datasets.Dataset) else list(_chunks(rows))
        if not parts:
            empty.append(name)
            continue
        try:
            tables[name] = datasets.concatenate_datasets(parts)
        except ValueError as error:
            raise DataError(f"split {name!r}: its rows do not fit together: {one_line(str(error))}") from error
    if not tables:
        raise DataError(f"the splits {empty} have no rows that can be used: download the data set again")
    columns = next(iter(tables.values())).features.arrow_schema
    return {name: tables.get(name) or datasets.Dataset(columns.empty_table()) for name in made}


def _chunks(rows: Iterable[Row]) -> Iterator[datasets.Dataset]:
    """Yield tables of some rows, which take much less memory than the rows."""
    left = iter(rows)
    while chunk := list(islice(left, _CHUNK_ROWS)):
        yield datasets.Dataset.from_list(chunk)
