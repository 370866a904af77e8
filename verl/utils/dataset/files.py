"""Reading and checking of data files; errors name file, row and column. Needs no torch."""

import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import xxhash

from verl.base_config import one_line
from verl.errors import DataError, MissingFile
from verl.utils.dataset.config import TRUNCATIONS, DataConfig
from verl.utils.fs import copy_to_local, unreadable_kind

GivenRow = Mapping[str, Any]
"""A row of a data set of any class, to be read only."""
Row = dict[str, Any]
"""The columns of one row, or the fields of one message in it."""

MESSAGES_FORM = 'must be a list of messages such as [{"role": "user", "content": "..."}]'
AGAIN = "write it again, or name another file"
EMPTY = "is an empty string: write a text"
NO_PROCESSOR = (
    "holds images or videos, but the model has no processor: remove them, or name a vision-language model with one"
)
NOT_TAKEN = "the model's processor does not take: remove them, or name a model that takes them"
MEDIA_KINDS = ("image", "video")
UNREAD_PARTS = ("image_url", "input_image", "video_url", "audio", "audio_url", "input_audio")
"""Types that other programs give to parts of a message with media."""
REWARD_MODEL_FORM = 'must be a dict such as {"style": "rule", "ground_truth": "42"}'

_VIEWS = {pa.string_view(): pa.string(), pa.binary_view(): pa.binary()}
_DIGEST_ROWS = 8192
_OPTIONS = "data.apply_chat_template_kwargs"
_CONTINUES = f"{_OPTIONS}.continue_final_message"
_JSON_CHUNK_ROWS = 65536


def checked_truncation(settings: DataConfig) -> str:
    """Return ``data.truncation``.

    Raises: DataError for an unknown value.
    """
    if settings.truncation not in TRUNCATIONS:
        raise DataError(f"data.truncation must be one of {TRUNCATIONS}, got {settings.truncation!r}")
    return settings.truncation


# ---- reading


def as_file_list(files: str | os.PathLike[str] | Iterable[str] | None) -> list[str]:
    """Return one or several paths as a list.

    Raises: DataError for an empty list.
    """
    paths = [files] if isinstance(files, str | os.PathLike) else list(files or [])
    if not paths:
        raise DataError("no data file is given: set data.train_files and data.val_files to parquet files")
    return [str(path) for path in paths]


def localize(files: Iterable[str], cache_dir: str | None = None, use_shm: bool = False) -> list[str]:
    """Return local paths; copy remote files first."""
    cache = os.path.expanduser(cache_dir) if cache_dir else None
    return [copy_to_local(os.path.expanduser(path), cache_dir=cache, use_shm=use_shm) for path in files]


def read_parquet(path: str) -> pa.Table:
    """Read one parquet file, or JSON lines if the name ends in ``.json`` or ``.jsonl``.

    Raises: DataError when the file is absent, has another format, or is empty.
    """
    problem = unreadable_kind(path)
    if problem is not None:
        raise DataError(f"{path}: {problem}: write the path of a parquet file")
    if not Path(path).exists():
        raise MissingFile(f"{path}: no such file; the scripts in examples/data_preprocess write data files")
    kind = "JSON lines" if path.endswith((".json", ".jsonl")) else "parquet"
    try:
        table = pq.read_table(path) if kind == "parquet" else _read_json_lines(path)
        table.validate(full=True)  # damaged texts and offsets would raise, or end the process, where a row is read
    except (pa.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read as {kind}: {one_line(str(error))}: {AGAIN}") from error
    if table.num_rows == 0:
        raise DataError(f"{path}: has no row: {AGAIN}")
    refuse_repeated(path, table.column_names)
    return as_plain(path, table)


def as_plain(path: str, table: pa.Table) -> pa.Table:
    """Convert the columns of a table to plain types, a categorical one to texts for instance.

    Raises: DataError naming the file and the column of a type that other programs cannot read.
    """
    plain = plain_schema(path, table.schema)
    return table if plain.equals(table.schema) else table.cast(plain)


def plain_schema(path: str, schema: pa.Schema) -> pa.Schema:
    """Return a schema with plain types.

    Raises: as ``as_plain``.
    """
    plain = []
    for field in schema:
        try:
            plain.append(_plain(field))
        except ValueError as error:
            hint = "write it as text, as numbers, as lists or as dicts, or leave it out"
            raise DataError(f"{path}, column {field.name!r}: holds values of type {error}: {hint}") from None
    return pa.schema(plain, schema.metadata)


def _plain(field: pa.Field) -> pa.Field:
    """Return a field with its plain type. Raises: ValueError naming a type without one.

    A type of pandas, such as a period, is one of Arrow's only in a process that has imported pandas; elsewhere it is a
    number whose field names it.
    """
    kind = field.type
    if b"ARROW:extension:name" in (field.metadata or {}):
        raise ValueError(field.metadata[b"ARROW:extension:name"].decode())
    if pa.types.is_dictionary(kind):
        kind = _plain(pa.field("", kind.value_type)).type
    elif kind in _VIEWS:
        kind = _VIEWS[kind]
    elif pa.types.is_struct(kind):
        kind = pa.struct([_plain(each) for each in kind])
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(_plain(kind.value_field), kind.list_size)
    elif pa.types.is_large_list(kind):
        kind = pa.large_list(_plain(kind.value_field))
    elif pa.types.is_list(kind):
        kind = pa.list_(_plain(kind.value_field))
    elif pa.types.is_map(kind):
        kind = pa.map_(_plain(kind.key_field), _plain(kind.item_field))
    elif isinstance(kind, pa.BaseExtensionType) and not isinstance(kind, pa.JsonType):
        raise ValueError(kind.extension_name)
    elif pa.types.is_nested(kind):  # the remaining nested types: list views and unions
        raise ValueError(str(kind))
    return field.with_type(kind)


def refuse_maps(path: str, schema: pa.Schema) -> None:
    """Raise DataError if a column holds maps, which the library ``datasets`` does not read."""
    for field in schema:
        if _holds_map(field.type):
            raise DataError(f"{path}, column {field.name!r}: holds maps, of type {field.type}: write dicts or lists")


def _holds_map(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return any(_holds_map(field.type) for field in kind)
    return pa.types.is_map(kind) or (is_list(kind) and _holds_map(kind.value_type))


def _read_json_lines(path: str) -> pa.Table:
    """Read JSON lines with Python's own reader.

    The reader of pyarrow turns texts that look like dates into dates, and nulls in lists into texts.
    """
    parts = []
    with open(path, encoding="utf-8-sig") as file:
        numbered = ((number, line) for number, line in enumerate(file, start=1) if line.strip())
        while chunk := list(islice(numbered, _JSON_CHUNK_ROWS)):
            rows = [_json_row(number, line) for number, line in chunk]
            names = dict.fromkeys(name for row in rows for name in row)
            parts.append(pa.table({name: _json_column(name, [row.get(name) for row in rows]) for name in names}))
    return concat_tables([path] * len(parts), parts) if parts else pa.table({})


def _json_column(name: str, values: list[Any]) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, ValueError, OverflowError) as error:
        raise ValueError(f"column {name!r}: {error}") from None


def _json_row(number: int, line: str) -> Row:
    try:
        row = json.loads(line.rstrip())
    except json.JSONDecodeError as error:
        raise ValueError(f"line {number}, character {error.colno}: {error.msg}") from None
    except RecursionError:
        raise ValueError(f"line {number}: is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError(f'line {number}: must be an object such as {{"prompt": ...}}')
    return row


def written_rows(table: pa.Table) -> list[Row]:
    """Return the rows of a table without the null fields that Arrow adds to dicts; a missing column is None."""
    return [written_row(row, table.schema) for row in table.to_pylist()]


def written_row(row: Row, schema: pa.Schema) -> Row:
    """Return a row as its author wrote it; see ``as_written``."""
    return {name: as_written(value, schema.field(name).type) for name, value in row.items()}


def as_written(value: Any, kind: pa.DataType) -> Any:
    """Drop the null fields of dicts, at any depth, from a value of an Arrow type.

    Arrow gives each dict of a column the fields of all others, as nulls, so a null field counts as not written. A null
    in a list, in a map or in JSON stays: only its author can have written it.
    """
    if value is None:
        return None
    if pa.types.is_struct(kind):
        present = ((field, value[field.name]) for field in kind if value[field.name] is not None)
        return {field.name: as_written(item, field.type) for field, item in present}
    if is_list(kind):
        return [as_written(item, kind.value_type) for item in value]
    if pa.types.is_map(kind):
        return {name: as_written(item, kind.item_type) for name, item in value}
    return value


def refuse_repeated(path: str, columns: list[str]) -> None:
    """Raise DataError if a file has several columns of one name."""
    repeated = next((name for name in columns if columns.count(name) > 1), None)
    if repeated is not None:
        times = columns.count(repeated)
        raise DataError(f"{path}: has {times} columns named {repeated!r}: keep one, and give the others another name")


def concat_tables(paths: list[str], tables: list[pa.Table]) -> pa.Table:
    """Join tables; a column that a table lacks becomes null there.

    Raises: DataError naming the file whose columns conflict with those of the first.
    """
    joined = tables[0]
    for path, table in zip(paths[1:], tables[1:], strict=True):
        try:
            joined = pa.concat_tables([joined, table], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _misfit(path, paths[0], error) from error
    return joined.replace_schema_metadata(None)  # given this metadata, the datasets library would decode images itself


def check_schemas(paths: list[str]) -> None:
    """Check that the columns of parquet files can be joined, and read by the library ``datasets``.

    Raises: DataError naming the first file with two columns of one name, with a column of a type that cannot be read,
        or whose columns conflict with those of the files before it.
    """
    joined = pa.schema([])
    for path in paths:
        schema = pq.read_schema(path)
        refuse_repeated(path, schema.names)
        schema = plain_schema(path, schema)
        refuse_maps(path, schema)
        try:
            joined = pa.unify_schemas([joined, schema], promote_options="permissive")
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
            raise _misfit(path, paths[0], error) from error


def _misfit(path: str, first: str, error: Exception) -> DataError:
    return DataError(
        f"{path}: its columns do not fit those of {first}: {one_line(str(error))}: write each column with one type"
    )


def first_rows(tables: list[pa.Table], most: int) -> list[pa.Table]:
    """Return the first ``most`` rows of several tables, one after the other; all if it is negative."""
    kept = []
    for table in tables:
        kept.append(table if most < 0 else table.slice(0, most))
        most = most if most < 0 else most - kept[-1].num_rows
    return kept


def rows_digest(tables: Iterable[pa.Table], kept: np.ndarray | None = None) -> str:
    """Return a digest of the rows in order, independent of the files' row groups; ``kept`` are the rows in use."""
    digest = _Digest()
    for table in tables:
        with pa.ipc.new_stream(pa.PythonFile(digest, "w"), table.schema) as stream:
            for start in range(0, table.num_rows, _DIGEST_ROWS):
                part = table.slice(start, _DIGEST_ROWS)
                stream.write_table(part.take(pa.array(range(part.num_rows))).combine_chunks())  # a copy in one form
    if kept is not None:
        digest.write(kept.astype(np.int64).tobytes())
    return digest.state.hexdigest()


class _Digest:
    """A file that keeps only a digest of its content."""

    closed = False

    def __init__(self) -> None:
        self.state = xxhash.xxh3_64()

    def write(self, content: bytes) -> int:
        self.state.update(content)
        return len(content)

    def flush(self) -> None:
        pass


def place_of(row: int, ends: np.ndarray) -> tuple[int, int]:
    """Return the file of a row of joined files, and its index there; ``ends`` are the cumulative row counts."""
    file = int(np.searchsorted(ends, row, side="right"))
    return file, row - (int(ends[file - 1]) if file else 0)


def with_columns(tables: list[pa.Table], names: Iterable[str]) -> list[pa.Table]:
    """Add the columns in ``names`` that some table has to all tables, filled with nulls."""
    for name in names:
        if any(name in table.column_names for table in tables):
            tables = [
                table if name in table.column_names else table.append_column(name, pa.nulls(table.num_rows))
                for table in tables
            ]
    return tables


# ---- checks of columns


@dataclass
class ColumnCheck:
    """Check the columns of one file, many rows at once; an error names the first bad row."""

    CHUNK_ROWS: ClassVar[int] = 65536  # keeps the text of a chunk under 2 GB, the most that one string array can hold

    path: str
    table: pa.Table
    first_row: int = 0
    columns_of_file: Iterable[str] = ()

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
            columns = sorted(self.columns_of_file or self.table.column_names)
            instead = f": write one of them in {key}, or add the column" if key else ": add it"
            self.fail(name, None, f"is missing; the file has {columns}{instead}", key)
        values = pa.concat_arrays(self.table[name].chunks)
        if not _is_valid(values):
            row = next(i for i in range(len(values)) if not _is_valid(values.take(pa.array([i]))))
            self.fail(name, row, "holds text that is not UTF-8: write it again", key)
        return values

    def refuse(self, name: str, bad: pa.Array | np.ndarray, problem: str, key: str | None = None) -> None:
        """Fail at the first row for which ``bad`` is true."""
        rows = np.flatnonzero(bad if isinstance(bad, np.ndarray) else pc.fill_null(bad, True).to_numpy(False))
        if len(rows):
            self.fail(name, int(rows[0]), problem + (f" (and {len(rows) - 1} more rows)" if len(rows) > 1 else ""), key)

    def text(self, name: str, key: str | None = None) -> pa.Array:
        """Check that a column holds non-empty strings."""
        values = self.column(name, key)
        self._strings(name, values, key)
        self.refuse(name, pc.equal(pc.utf8_length(values), 0), EMPTY, key)
        return values

    def texts(self, name: str, key: str, fields: Iterable[str] = ()) -> list[str]:
        """Return the strings of a column; ``fields`` is the path to them in a column of dicts.

        In a column of lists of dicts, as of messages, the path leads on from each dict, and newlines join its strings.
        """
        values = self.column(name, key)
        offsets: pa.Array | None = None
        for field in fields:
            if offsets is None and is_list(values.type):
                self.refuse(name, pc.is_null(values), "is null", key)
                self.refuse(name, pc.equal(pc.list_value_length(values), 0), "is an empty list", key)
                lists = values.cast(pa.list_(values.type.value_type))
                offsets = lists.offsets
                values = lists.values
            if not pa.types.is_struct(values.type) or field not in [f.name for f in values.type]:
                self.fail(name, 0, f"has no field {field!r}, it is {values.type}", f"{key} with its dict keys")
            values = pc.struct_field(values, field)
            name = f"{name}.{field}"
        if offsets is not None and is_text(values.type):
            texts = pc.cast(values, pa.large_string())
            values = pc.binary_join(pa.ListArray.from_arrays(offsets, texts), pa.scalar("\n", pa.large_string()))
        self._strings(name, values, key)
        return values.to_pylist()

    def _strings(self, name: str, values: pa.Array, key: str | None) -> None:
        if not is_text(values.type):
            self.fail(name, 0, f"must be a string, got {values.type}", key)
        self.refuse(name, pc.is_null(values), "is null, must be a string", key)

    def messages(self, name: str, key: str | None = None, text_only: bool = True) -> pa.Array:
        """Check that a column holds non-empty lists of ``{role, content}``."""
        values = self.column(name, key)
        if not is_list(values.type):
            self.fail(name, 0, f"{MESSAGES_FORM}, got {values.type}", key)
        self.refuse(name, pc.is_null(values), f"is null, {MESSAGES_FORM}", key)
        self.refuse(name, pc.equal(pc.list_value_length(values), 0), f"is empty, {MESSAGES_FORM}", key)
        messages = pc.list_flatten(values)
        parents = pc.list_parent_indices(values).to_numpy(False)
        if not pa.types.is_struct(messages.type):
            self.fail(name, 0, f"{MESSAGES_FORM}, got a list of {messages.type}", key)
        self._per_row(name, parents, pc.is_null(messages), f"holds a null message, {MESSAGES_FORM}", key)
        fields = [item.name for item in messages.type]
        for field in ("role", "content"):
            if field not in fields:
                self.fail(name, 0, f"its messages lack {field!r}, they have {fields}; {MESSAGES_FORM}", key)
            part = pc.struct_field(messages, field)
            if not is_text(part.type) and not (field == "content" and not text_only and is_list(part.type)):
                self.fail(f"{name}.{field}", 0, f"must be a string, got {part.type}", key)
            self._per_row(f"{name}.{field}", parents, pc.is_null(part), "is null, must be a string", key)
            if field == "role":
                self._per_row(f"{name}.role", parents, pc.equal(pc.utf8_length(part), 0), EMPTY, key)
        return values

    def _per_row(self, name: str, parents: np.ndarray, bad: pa.Array, problem: str, key: str | None) -> None:
        flagged = np.zeros(self.table.num_rows, dtype=bool)
        flagged[parents[pc.fill_null(bad, True).to_numpy(False)]] = True
        self.refuse(name, flagged, problem, key)


def _is_valid(values: pa.Array) -> bool:
    try:
        values.validate(full=True)
    except pa.ArrowInvalid:
        return False
    return True


def is_text(kind: pa.DataType) -> bool:
    """Whether values of this type are strings."""
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)


def is_list(kind: pa.DataType) -> bool:
    """Whether values of this type are lists."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


# ---- checks of rows


def check_prompts(check: ColumnCheck, prompt_key: str, text_only: bool, options: Mapping[str, Any] = {}) -> None:
    """Reject rows without a prompt, and prompts after which a response would be no turn of the assistant.

    Args: ``options`` go to the chat template.

    Raises: DataError naming file, row and column.
    """
    key = "data.prompt_key"
    values = check.messages(prompt_key, key, text_only=text_only)
    last = np.cumsum(pc.list_value_length(values).to_numpy(False)) - 1
    roles = pc.struct_field(pc.list_flatten(values), "role").take(pa.array(last))
    by_assistant = pc.equal(roles, "assistant")
    if options.get("continue_final_message"):
        problem = (
            f"ends with a message that is not the assistant's, and {_CONTINUES}=true lets the response continue it"
        )
        check.refuse(prompt_key, pc.invert(by_assistant), f"{problem}: end it with the beginning of the response", key)
    elif options.get("add_generation_prompt", True):
        problem = (
            "ends with an assistant's message, after which the response would be a second turn of the assistant: end "
            f"it with a message of another role, or write {_CONTINUES}=true and {_OPTIONS}.add_generation_prompt=false "
            "if the response is to continue it"
        )
        check.refuse(prompt_key, by_assistant, problem, key)


def check_prompt_rows(
    check: ColumnCheck, prompt_key: str, reward_fn_key: str, text_only: bool, options: Mapping[str, Any] = {}
) -> None:
    """Reject rows without a usable prompt or without the fields that scoring needs.

    Args: ``options`` go to the chat template.

    Raises: DataError naming file, row and column.
    """
    check_prompts(check, prompt_key, text_only, options)
    check_reward_columns(check, reward_fn_key)


def check_reward_columns(check: ColumnCheck, reward_fn_key: str) -> None:
    """Reject rows without the fields that scoring needs.

    Raises: DataError naming file, row and column.
    """
    check.text(reward_fn_key, "data.reward_fn_key")
    values = check.column("reward_model")
    if not pa.types.is_struct(values.type):
        check.fail("reward_model", 0, f"{REWARD_MODEL_FORM}, got {values.type}")
    check.refuse("reward_model", pc.is_null(values), f"is null, {REWARD_MODEL_FORM}")
    fields = [field.name for field in values.type]
    by_model = pa.array(np.zeros(len(values), dtype=bool))
    if "style" in fields:
        style = pc.struct_field(values, "style")
        if not (is_text(style.type) or pa.types.is_null(style.type)):
            check.fail("reward_model.style", 0, f'must be a string such as "rule" or "model", got {style.type}')
        by_model = pc.fill_null(pc.equal(pc.cast(style, pa.string()), "model"), False)
    lacking = pa.array(np.ones(len(values), dtype=bool))
    if "ground_truth" in fields:
        lacking = pc.is_null(pc.struct_field(values, "ground_truth"))
    if "extra_info" in check.table.column_names:
        kind = check.column("extra_info").type
        if not (pa.types.is_struct(kind) or pa.types.is_null(kind)):
            check.fail("extra_info", 0, f"must be a dict, got {kind}")
    check.refuse("reward_model.ground_truth", pc.and_not(lacking, by_model), "is missing: a rule scorer needs it")


def check_text_pairs(check: ColumnCheck, settings: DataConfig) -> tuple[list[str], list[str]]:
    """Return the prompts and the responses of supervised rows of text.

    Raises: DataError naming file, row and column.
    """
    prompts = check.texts(settings.prompt_key, "data.prompt_key", settings.prompt_dict_keys or ())
    return prompts, check.texts(settings.response_key, "data.response_key", settings.response_dict_keys or ())


def check_conversations(check: ColumnCheck, messages_key: str) -> None:
    """Reject rows without a conversation.

    Only the outer type is checked: a message that only calls tools has no content.

    Raises: DataError naming file, row and column.
    """
    values = check.column(messages_key, "data.messages_key")
    if not is_list(values.type):
        check.messages(messages_key, "data.messages_key")
    check.refuse(messages_key, pc.is_null(values), f"is null, {MESSAGES_FORM}", "data.messages_key")
    check.refuse(
        messages_key, pc.equal(pc.list_value_length(values), 0), f"is empty, {MESSAGES_FORM}", "data.messages_key"
    )
    if not pa.types.is_struct(values.type.value_type) or values.type.value_type.get_field_index("role") < 0:
        check.fail(messages_key, 0, f"{MESSAGES_FORM}, got a list of {values.type.value_type}", "data.messages_key")


def check_data_sources(check: ColumnCheck, reward_fn_key: str, problem_of: Callable[[str], str | None]) -> None:
    """Reject rows whose data source cannot be scored; ``problem_of`` gives the reason.

    Raises: DataError naming file, row and column.
    """
    values = check.text(reward_fn_key, "data.reward_fn_key")
    for source in pc.unique(values).to_pylist():
        problem = problem_of(source)
        if problem is not None:
            check.refuse(reward_fn_key, pc.equal(values, source), problem, "data.reward_fn_key")


def check_vision_rows(check: ColumnCheck, settings: DataConfig, kinds: Collection[str], prompt_key: str) -> None:
    """Reject images and videos that the model or the prompt cannot take, and markers without them.

    Args: ``kinds`` are those that the model's processor takes; ``prompt_key`` is the column of messages.

    Raises: DataError naming file, row and column.
    """
    columns = settings.media_columns()
    for kind in MEDIA_KINDS:
        name = columns.get(kind)
        if name is None or name not in check.table.column_names:
            _check_markers(check, kind, name, kinds, prompt_key)
            continue
        key = f"data.{kind}_key"
        counts = _media_counts(check, name, key)
        if kind not in kinds:
            check.refuse(name, counts > 0, f"holds {kind}s, which {NOT_TAKEN}" if kinds else NO_PROCESSOR, key)
            _check_markers(check, kind, None, kinds, prompt_key)
            continue
        for limit, most in _limits(settings, kind):
            if (counts > most).any():
                row = int(np.argmax(counts > most))
                limit = f"actor_rollout_ref.rollout.{limit}"
                check.fail(name, row, f"holds {counts[row]} {kind}s, more than {limit}={most}: raise it", key)
        places = _count_places(check.column(prompt_key), kind)
        if (counts != places).any():
            row = int(np.argmax(counts != places))
            problem = f"holds {counts[row]} {kind}s, but column {prompt_key!r} has {places[row]} <{kind}> markers"
            check.fail(name, row, problem, key)
    unread = _count_places(check.column(prompt_key), *UNREAD_PARTS, markers=False)
    if unread.any():
        problem = f"has parts of other types than text, image and video, such as {' or '.join(UNREAD_PARTS)}"
        check.fail(prompt_key, int(np.argmax(unread > 0)), f"{problem}: no column holds them, so nothing reads them")


def refuse_media(check: ColumnCheck, settings: DataConfig) -> None:
    """Reject rows with images and videos, for a data set that reads text only.

    Raises: DataError naming file, row and column.
    """
    for kind, name in settings.media_columns().items():
        if name in check.table.column_names:
            problem = f"holds {kind}s, and this data set reads text only: drop the column"
            check.refuse(name, _media_counts(check, name, f"data.{kind}_key") > 0, problem)


def _media_counts(check: ColumnCheck, name: str, key: str) -> np.ndarray:
    """Return the number of entries of a column of media in each row."""
    values = check.column(name)
    if pa.types.is_null(values.type):
        return np.zeros(len(values), dtype=int)
    if not is_list(values.type):
        check.fail(name, 0, f"must be a list, got {values.type}", key)
    return pc.fill_null(pc.list_value_length(values), 0).to_numpy(False)


def _check_markers(check: ColumnCheck, kind: str, name: str | None, kinds: Collection[str], prompt_key: str) -> None:
    """Reject rows with markers of a medium that column ``name`` does not hold; without a name, markers are text."""
    places = _count_places(check.column(prompt_key), kind, markers=name is not None and kind in kinds)
    if not places.any():
        return
    row = int(np.argmax(places > 0))
    if kind not in kinds:
        check.fail(prompt_key, row, f"has {places[row]} parts of type {kind!r}, which {NOT_TAKEN}")
    key = f"data.{kind}_key"
    if name is None:
        check.fail(
            prompt_key, row, f"has {places[row]} parts of type {kind!r}, and {key}=null: name their column in it"
        )
    columns = sorted(check.columns_of_file or check.table.column_names)
    check.fail(
        prompt_key,
        row,
        f"has {places[row]} <{kind}> markers, and the file has no column {name!r}, it has {columns}: write the column "
        f"of the {kind}s in {key}, or {key}=null if the markers are text",
    )


def _limits(settings: DataConfig, kind: str) -> Iterator[tuple[str, int]]:
    """Yield the rollout keys that limit the images or videos of a prompt, with the limits."""
    if kind == "image" and settings.limit_images is not None:
        yield "limit_images", settings.limit_images
    bound = (settings.limit_mm_per_prompt or {}).get(kind)
    if isinstance(bound, Mapping):  # vLLM's longer form also holds sizes
        bound = bound.get("count")
    if bound is not None:
        yield f"engine_kwargs.vllm.limit_mm_per_prompt.{kind}", bound


def _count_places(messages: pa.Array, *kinds: str, markers: bool = True) -> np.ndarray:
    """Count typed parts of the given kinds in the messages of each row, and markers unless these are text."""
    flat = pc.list_flatten(messages)
    if flat.type.get_field_index("content") < 0:
        return np.zeros(len(messages), dtype=int)
    content = pc.struct_field(flat, "content")
    if is_list(content.type):
        found = [sum((part or {}).get("type") in kinds for part in parts or []) for parts in content.to_pylist()]
    elif markers and is_text(content.type):
        counts = [pc.fill_null(pc.count_substring(content, f"<{kind}>"), 0).to_numpy(False) for kind in kinds]
        found = np.sum(counts, axis=0)
    else:
        return np.zeros(len(messages), dtype=int)
    parents = pc.list_parent_indices(messages).to_numpy(False)
    return np.bincount(parents, weights=found, minlength=len(messages)).astype(int)
