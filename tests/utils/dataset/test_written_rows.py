"""Rows leave a file as their author wrote them: without the nulls that Arrow puts where other rows have a field."""

import io
import json
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf

from verl.experimental.dynamic_dataset.dynamicgen_dataset import AbstractDataGenerator, DynamicGenDataset
from verl.trainer import main_eval
from verl.utils.dataset import files
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset

# ---- any row


def kinds() -> st.SearchStrategy[pa.DataType]:
    """Arrow types as data files have them, nested."""
    names = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3, unique=True)

    def nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
        structs = names.flatmap(lambda keys: st.tuples(*(inner for _ in keys)).map(lambda each: (keys, each)))
        return inner.map(pa.list_) | structs.map(lambda pair: pa.struct(list(zip(*pair, strict=True))))

    return st.recursive(st.sampled_from([pa.string(), pa.int64(), pa.float64(), pa.bool_()]), nested, max_leaves=6)


_SCALARS = {
    pa.string(): st.sampled_from(["", "x", '{"a": null}', "2024-05-01", "null"]),
    pa.int64(): st.integers(-3, 3),
    pa.float64(): st.sampled_from([0.5, -1.25]),
    pa.bool_(): st.booleans(),
}


def values(kind: pa.DataType) -> st.SearchStrategy[Any]:
    """What an author may write for a type: fields are left out, items of lists may be null."""
    if pa.types.is_struct(kind):
        return st.fixed_dictionaries({}, optional={field.name: values(field.type) for field in kind})
    if pa.types.is_list(kind):
        return st.lists(st.none() | values(kind.value_type), max_size=3)
    return _SCALARS[kind]


@st.composite
def tables(draw: st.DrawFn) -> tuple[pa.Schema, list[dict[str, Any]]]:
    """A schema, and rows in which every column has a value."""
    schema = pa.schema([(name, draw(kinds())) for name in "pq"])
    rows = st.fixed_dictionaries({field.name: values(field.type) for field in schema})
    return schema, draw(st.lists(rows, min_size=1, max_size=4))


@settings(max_examples=150, deadline=None)
@given(tables())
def test_rows_come_back_as_they_were_written(drawn: tuple[pa.Schema, list[dict[str, Any]]]) -> None:
    schema, rows = drawn
    file = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows, schema), file)
    table = pq.read_table(file)
    assert files.written_rows(table) == rows
    prompts = object.__new__(RLHFDataset)
    prompts.dataframe = datasets.Dataset(table)
    assert [prompts.dataframe[row] for row in range(len(rows))] == rows
    assert prompts.dataframe[:] == {name: [row[name] for row in rows] for name in schema.names}


@settings(max_examples=50, deadline=None)
@given(drawn=tables())
def test_rows_of_json_lines_come_back_too(drawn: tuple[pa.Schema, list[dict[str, Any]]], tmp_path_factory: Any) -> None:
    _, rows = drawn
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert files.written_rows(files.read_parquet(str(path))) == rows


def test_maps_and_json_keep_their_nulls() -> None:
    of_map = pa.array([[("a", 1), ("b", None)], []], pa.map_(pa.string(), pa.int64()))
    of_json = pa.array(['{"x": 1, "n": null}', '{"x": "s"}'], pa.json_(pa.string()))
    table = pa.table({"map": of_map, "json": of_json})
    assert files.written_rows(table)[0] == {"map": {"a": 1, "b": None}, "json": '{"x": 1, "n": null}'}
    prompts = object.__new__(RLHFDataset)
    prompts.dataframe = datasets.Dataset(table.select(["json"]))  # the library reads JSON itself
    assert prompts.dataframe[0] == {"json": {"x": 1, "n": None}}


# ---- wherever rows are read

CALLS = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% for c in m.get('tool_calls') or [] %}"
    "CALL {{ c['function']['arguments'] | tojson }}{% endfor %}<|end|>{% endfor %}"
    "{% if tools %}TOOLS {{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def schema_of(name: str, **properties: Any) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": list(properties)}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


def called(name: str, arguments: dict[str, Any]) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "go"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "ok"},
    ]


TOOLS = [schema_of("weather", city={"type": "string"}), schema_of("clock", zone={"type": "integer", "enum": [1, 2]})]


def test_supervised_rows(tokenizer: Any, parquet: Any) -> None:
    talks = [called("weather", {"city": "Oslo"}), called("clock", {"zone": 2})]
    said = [{"role": "assistant", "content": "done"}]
    path = parquet([{"messages": [*talk, *said], "tools": [tool]} for talk, tool in zip(talks, TOOLS, strict=True)])
    options = {"chat_template": CALLS}
    data = MultiTurnSFTDataset(path, tokenizer, {"max_length": 1024, "apply_chat_template_kwargs": options})
    texts = [tokenizer.decode(data[row]["input_ids"]) for row in range(2)]
    assert 'CALL {"city": "Oslo"}' in texts[0] and 'CALL {"zone": 2}' in texts[1]
    assert all("null" not in text for text in texts) and json.dumps([TOOLS[1]]) in texts[1]


@pytest.fixture
def rows(row: Any) -> list[dict[str, Any]]:
    interaction = {"name": "n", "deep": [{"k": 1}, None]}
    extra = [{"tools_kwargs": {"a": {"create_kwargs": {"x": 1}}}}, {"interaction_kwargs": interaction}]
    truths = [{"answer": "1"}, {"tests": [{"in": "2"}, {"out": "3"}]}]
    talks = [called("weather", {"city": "Oslo"}), called("clock", {"zone": 2})]
    return [
        row(prompt=talk, extra_info=more, reward_model={"style": "rule", "ground_truth": truth}, **{f"only_{at}": at})
        for at, (talk, more, truth) in enumerate(zip(talks, extra, truths, strict=True))
    ]


def test_prompts_of_training(tokenizer: Any, parquet: Any, rows: list[dict[str, Any]]) -> None:
    options = {"apply_chat_template_kwargs": {"chat_template": CALLS}, "return_full_prompt": True}
    config = {"max_prompt_length": 256, "return_raw_chat": True, **options}
    data = RLHFDataset(parquet(rows), tokenizer, config)
    for item, written in zip((data[0], data[1]), rows, strict=True):
        extra = written["extra_info"]
        assert item["raw_prompt"] == written["prompt"] and "null" not in item["full_prompts"]
        assert item["extra_info"] == extra and item["reward_model"] == written["reward_model"]
        assert item["tools_kwargs"] == extra.get("tools_kwargs", {})
        assert item["interaction_kwargs"] == extra.get("interaction_kwargs", {})


class Reads(AbstractDataGenerator):
    """Notes the rows of the data set, and returns the first."""

    def generate(self, dataset: DynamicGenDataset) -> datasets.Dataset:
        """Return the first row."""
        self.seen = [dataset.dataframe[row] for row in range(len(dataset))]
        return datasets.Dataset.from_list([self.seen[0]], features=dataset.dataframe.features)


def test_rows_that_a_generator_reads_and_makes(tokenizer: Any, parquet: Any, rows: list[dict[str, Any]]) -> None:
    options = {"chat_template": CALLS}
    config = {"datagen": {"path": __file__, "name": "Reads"}, "apply_chat_template_kwargs": options}
    data = DynamicGenDataset(parquet(rows), tokenizer, {"max_prompt_length": 256, "return_raw_chat": True, **config})
    assert [seen["extra_info"] for seen in data.data_generator.seen] == [each["extra_info"] for each in rows]
    assert data[2]["raw_prompt"] == rows[0]["prompt"] and data[2]["extra_info"] == rows[0]["extra_info"]


def test_rows_of_main_eval(tmp_path: Path, parquet: Any, rows: list[dict[str, Any]]) -> None:
    path = parquet([{**each, "responses": ["1"]} for each in rows])
    node = {"path": path, "response_key": "responses", "data_source_key": "data_source"}
    config = {"data": {**node, "reward_model_key": "reward_model"}, "scoring": {"timeout_s": 1, "failure_score": 0}}
    scorer = {"path": None, "name": None}
    _, read, _ = main_eval.prepare(OmegaConf.create({**config, "custom_reward_function": scorer}))
    assert [each.ground_truth for each in read] == [each["reward_model"]["ground_truth"] for each in rows]
    assert [each.extra_info for each in read] == [each["extra_info"] for each in rows]
