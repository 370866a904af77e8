"""Reading of parquet files, and errors that name file, row and column."""

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj
import pyarrow.parquet as pq

from verl.utils.fs import copy_to_local


class DataError(ValueError):
    """A data file or one of its rows is not what the data set needs."""


class DataFileNotFoundError(DataError, FileNotFoundError):
    """A data file does not exist."""


def as_file_list(files: Any) -> list[str]:
    """Return one or several paths as a list.

    Raises: DataError when there is none.
    """
    paths = [files] if isinstance(files, str | os.PathLike) else list(files or [])
    if not paths:
        raise DataError("no data file is given: set data.train_files and data.val_files to parquet files")
    return [str(path) for path in paths]


def localize(files: Iterable[str], cache_dir: str | None = None, use_shm: bool = False) -> list[str]:
    """Return local paths, after copying what lies on HDFS."""
    cache = os.path.expanduser(cache_dir) if cache_dir else None
    return [copy_to_local(os.path.expanduser(path), cache_dir=cache, use_shm=use_shm) for path in files]


def read_parquet(path: str) -> pa.Table:
    """Read one parquet file, or JSON lines where the name ends in ``.json`` or ``.jsonl``.

    Raises: DataError when the file is absent, is of another format, or has no row.
    """
    if not Path(path).exists():
        raise DataFileNotFoundError(
            f"{path}: no such file; see examples/data_preprocess for scripts that write data files"
        )
    kind = "JSON lines" if path.endswith((".json", ".jsonl")) else "parquet"
    try:
        table = pq.read_table(path) if kind == "parquet" else pj.read_json(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: cannot be read as {kind}: {error}") from error
    if table.num_rows == 0:
        raise DataError(f"{path}: has no row")
    return table


def concat_tables(paths: list[str], tables: list[pa.Table]) -> pa.Table:
    """Join tables; columns that some of them lack become null.

    Raises: DataError naming the file whose columns do not fit those of the first.
    """
    joined = tables[0]
    for path, table in zip(paths[1:], tables[1:], strict=True):
        try:
            joined = pa.concat_tables([joined, table], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise DataError(f"{path}: its columns do not fit those of {paths[0]}: {error}") from error
    return joined


def with_columns(tables: list[pa.Table], names: Iterable[str]) -> list[pa.Table]:
    """Give tables the columns among ``names`` that another of them has; they are null there."""
    for name in names:
        if any(name in table.column_names for table in tables):
            tables = [
                table if name in table.column_names else table.append_column(name, pa.nulls(table.num_rows))
                for table in tables
            ]
    return tables


class ColumnCheck:
    """Checks of one file's columns, made on many rows at once; an error names the first bad row."""

    CHUNK_ROWS = 65536  # keeps the text of a chunk under the 2 GB that one string array can hold

    def __init__(
        self, path: str, table: pa.Table, first_row: int = 0, columns_of_file: Iterable[str] | None = None
    ) -> None:
        self.path = path
        self.table = table
        self.first_row = first_row
        self.columns_of_file = sorted(columns_of_file or table.column_names)

    @classmethod
    def over(cls, path: str, table: pa.Table) -> Iterator["ColumnCheck"]:
        """Yield a check for each part of a table."""
        for start in range(0, table.num_rows, cls.CHUNK_ROWS):
            yield cls(path, table.slice(start, cls.CHUNK_ROWS), start)

    def fail(self, column: str, row: int | None, problem: str, key: str | None = None) -> NoReturn:
        """Raise the error; ``key`` is the config key that names the column."""
        where = f"{self.path}, " + ("" if row is None else f"row {self.first_row + row}, ") + f"column {column!r}"
        raise DataError(where + (f" ({key})" if key else "") + f": {problem}")

    def column(self, name: str, key: str | None = None) -> pa.Array:
        """Return a column as one array."""
        if name not in self.table.column_names:
            self.fail(name, None, f"is missing; the file has {self.columns_of_file}", key)
        return pa.concat_arrays(self.table[name].chunks)

    def refuse(self, name: str, bad: pa.Array | np.ndarray, problem: str, key: str | None = None) -> None:
        """Fail at the first row where ``bad`` is true."""
        rows = np.flatnonzero(bad if isinstance(bad, np.ndarray) else pc.fill_null(bad, True).to_numpy(False))
        if len(rows):
            self.fail(name, int(rows[0]), problem + (f" (and {len(rows) - 1} more rows)" if len(rows) > 1 else ""), key)

    def text(self, name: str, key: str | None = None) -> pa.Array:
        """Check that a column holds non-empty strings."""
        values = self.column(name, key)
        if not is_text(values.type):
            self.fail(name, 0, f"must be a string, got {values.type}", key)
        self.refuse(name, pc.is_null(values), "is null, must be a string", key)
        self.refuse(name, pc.equal(pc.utf8_length(values), 0), "is an empty string", key)
        return values

    def messages(self, name: str, key: str | None = None, text_only: bool = True) -> pa.Array:
        """Check that a column holds non-empty lists of ``{role, content}``."""
        wanted = 'must be a list of messages such as [{"role": "user", "content": "..."}]'
        values = self.column(name, key)
        if not is_list(values.type):
            self.fail(name, 0, f"{wanted}, got {values.type}", key)
        self.refuse(name, pc.is_null(values), f"is null, {wanted}", key)
        self.refuse(name, pc.equal(pc.list_value_length(values), 0), f"is empty, {wanted}", key)
        messages, parents = pc.list_flatten(values), pc.list_parent_indices(values).to_numpy(False)
        if not pa.types.is_struct(messages.type):
            self.fail(name, 0, f"{wanted}, got a list of {messages.type}", key)
        self._per_row(name, parents, pc.is_null(messages), f"holds a null message, {wanted}", key)
        for field in ("role", "content"):
            self._message_field(name, messages, parents, field, text_only, key)
        return values

    def _message_field(
        self, name: str, messages: pa.Array, parents: np.ndarray, field: str, text_only: bool, key: str | None
    ) -> None:
        names = [item.name for item in messages.type]
        if field not in names:
            self.fail(name, 0, f"its messages lack {field!r}, they have {names}", key)
        part = pc.struct_field(messages, field)
        if not is_text(part.type) and not (field == "content" and not text_only and is_list(part.type)):
            self.fail(f"{name}.{field}", 0, f"must be a string, got {part.type}", key)
        self._per_row(f"{name}.{field}", parents, pc.is_null(part), "is null, must be a string", key)
        if field == "role":
            self._per_row(f"{name}.role", parents, pc.equal(pc.utf8_length(part), 0), "is an empty string", key)

    def _per_row(self, name: str, parents: np.ndarray, bad: pa.Array, problem: str, key: str | None) -> None:
        flagged = np.zeros(self.table.num_rows, dtype=bool)
        flagged[parents[pc.fill_null(bad, True).to_numpy(False)]] = True
        self.refuse(name, flagged, problem, key)


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are strings."""
    if pa.types.is_dictionary(kind):
        return is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether values of this type are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)
