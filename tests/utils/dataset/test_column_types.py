"""A column of any Arrow type is read as its plain type, or refused with its file and its name."""

from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.errors import DataError
from verl.trainer.run.inputs import column_checks
from verl.utils.dataset import files
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset, SFTDataset

ROWS = 3
MESSAGES = {"messages_key": "prompt", "max_length": 128}


def recoded(values: pa.Array) -> pa.Array:
    """Return values with all their texts as categories; Arrow casts to categories at the top only."""
    if pa.types.is_struct(values.type):
        fields = [field.name for field in values.type]
        return pa.StructArray.from_arrays([recoded(values.field(name)) for name in fields], fields)
    if pa.types.is_list(values.type):
        return pa.ListArray.from_arrays(values.offsets, recoded(values.values))
    return values.dictionary_encode() if pa.types.is_string(values.type) else values


def large(kind: pa.DataType) -> pa.DataType:
    """Return a type with 64-bit offsets for its texts and lists."""
    if pa.types.is_struct(kind):
        return pa.struct([(field.name, large(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.large_list(large(kind.value_type))
    return pa.large_string() if pa.types.is_string(kind) else kind


def views(kind: pa.DataType) -> pa.DataType:
    return pa.string_view() if pa.types.is_string(kind) else kind


FORMS = {
    "categories": recoded,
    "large": lambda values: values.cast(large(values.type)),
    "views": lambda values: values.cast(views(values.type)),
}


@pytest.fixture
def prompts(row: Any) -> pa.Table:
    """Return rows that supervised training reads too: with an answer, and a question after it."""
    turns = [("user", "one"), ("assistant", "yes"), ("user", "two")]
    prompt = [{"role": role, "content": text} for role, text in turns]
    made = [row(prompt=prompt, extra_info={"index": i, "tags": ["a", "b"][: i % 3]}) for i in range(ROWS)]
    return pa.Table.from_pylist(made)


def written(path: Path, table: pa.Table) -> str:
    pq.write_table(table, path)
    return str(path)


@pytest.mark.parametrize("form", FORMS)
def test_other_forms_of_texts_and_lists_are_the_same_rows(
    tmp_path: Path, prompts: pa.Table, tokenizer: Any, form: str
) -> None:
    other = pa.table({name: FORMS[form](prompts[name].combine_chunks()) for name in prompts.column_names})
    assert other.schema != prompts.schema
    plain, changed = written(tmp_path / "plain.parquet", prompts), written(tmp_path / f"{form}.parquet", other)
    expected = RLHFDataset(plain, tokenizer, {"max_prompt_length": 128})
    found = RLHFDataset(changed, tokenizer, {"max_prompt_length": 128, "filter_overlong_prompts": True})
    for item in range(ROWS):
        ours, theirs = found[item], expected[item]
        assert str(ours) == str(theirs)
    talks = [MultiTurnSFTDataset(path, tokenizer, MESSAGES)[1]["input_ids"].tolist() for path in (plain, changed)]
    assert talks[0] == talks[1]
    pairs = {"prompt_key": "ability", "response_key": "data_source", "max_length": 64}
    ids = [SFTDataset(path, tokenizer, pairs)[1]["input_ids"].tolist() for path in (plain, changed)]
    assert ids[0] == ids[1]
    files.check_schemas([plain, changed])
    (check,) = column_checks(changed, ["prompt", "data_source", "reward_model"])
    files.check_prompt_rows(check, "prompt", "data_source", text_only=True)


def test_a_file_with_categories_is_joined_with_one_of_texts(tmp_path: Path, prompts: pa.Table, tokenizer: Any) -> None:
    other = pa.table({name: recoded(prompts[name].combine_chunks()) for name in prompts.column_names})
    paths = [written(tmp_path / "a.parquet", prompts), written(tmp_path / "b.parquet", other)]
    files.check_schemas(paths)
    assert len(RLHFDataset(paths, tokenizer, {"max_prompt_length": 128})) == 2 * ROWS


REFUSED = {
    "pandas.period": pd.Series(pd.period_range("2020-01", periods=ROWS, freq="M")),
    "pandas.interval": pd.Series(pd.interval_range(0, ROWS)),
    "arrow.uuid": pa.array([uuid4().bytes] * ROWS, pa.uuid()),
    "arrow.fixed_shape_tensor": pa.FixedShapeTensorArray.from_numpy_ndarray(np.zeros((ROWS, 2, 2))),
    "list_view": pa.array([["a"]] * ROWS, pa.list_view(pa.string())),
}


@pytest.mark.parametrize("place", ["", "extra_info"])
@pytest.mark.parametrize("kind", REFUSED)
def test_a_type_without_a_plain_form_is_refused_with_its_column(
    tmp_path: Path, prompts: pa.Table, kind: str, place: str
) -> None:
    values = pa.array(REFUSED[kind])
    if place:
        values = pa.StructArray.from_arrays([pa.array(range(ROWS)), values], ["index", "mine"])
    prompts = prompts.drop_columns([place]) if place else prompts
    column = place or "mine"
    path = written(tmp_path / "mine.parquet", prompts.append_column(column, values))
    for read in (
        files.read_parquet,
        lambda path: files.check_schemas([path]),
        lambda path: list(column_checks(path, ["prompt"])),
    ):
        with pytest.raises(DataError) as info:
            read(path)
        assert all(part in str(info.value) for part in (path, repr(column), kind, "write it as text"))


def test_prompts_with_maps_are_refused_before_and_in_the_data_set(
    tmp_path: Path, prompts: pa.Table, tokenizer: Any
) -> None:
    maps = pa.array([[("a", 1)]] * ROWS, pa.map_(pa.string(), pa.int64()))
    path = written(tmp_path / "maps.parquet", prompts.append_column("mine", maps))
    for read in (
        lambda: files.check_schemas([path]),
        lambda: RLHFDataset(path, tokenizer, {"max_prompt_length": 128}),
    ):
        with pytest.raises(DataError, match="column 'mine': holds maps.*: write dicts or lists"):
            read()
    assert len(MultiTurnSFTDataset(path, tokenizer, MESSAGES)) == ROWS
