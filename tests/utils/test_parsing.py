"""JSON and YAML of other people: one error for what cannot be read, and an end for what has none."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.base_config import WrongInput
from verl.experimental.agent_loop.registry import read_agent_loops
from verl.tools.retrieval_index import read_corpus
from verl.tools.utils.mcp_client import read_servers
from verl.utils import class_files
from verl.utils.chat.messages import plain
from verl.utils.class_files import read_class_items
from verl.utils.dataset.files import _json_row
from verl.utils.parsing import MOST_YAML_VALUES, parse_json, parse_yaml
from verl.utils.reward_score import code_tests

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)
DEEP = 100_000


def laughs(lists: int, width: int) -> str:
    """Return YAML whose last value has ``width ** lists`` others in it."""
    lines = ["a0: &a0 [" + ", ".join(["x"] * width) + "]"]
    lines += [f"a{at}: &a{at} [{', '.join([f'*a{at - 1}'] * width)}]" for at in range(1, lists)]
    return "\n".join(lines)


DEEP_JSON = ["[" * DEEP, "[" * DEEP + "]" * DEEP, '{"a":' * DEEP, '{"a":' * DEEP + "1" + "}" * DEEP]


@pytest.mark.parametrize("text", [*DEEP_JSON, "", "{", "nul", '"\\x"', b"\xff\xfe\xff"], ids=range(9))
def test_json_that_cannot_be_read_is_a_value_error(text: Any) -> None:
    with pytest.raises(ValueError):
        parse_json(text)


BAD_YAML = {
    "aliases": laughs(9, 9),
    "aliases of mappings": "a: &a {b: 1, c: 1}\n"
    + "\n".join(f"a{at}: &a{at} {{b: *a{at - 1 if at else ''}, c: *a{at - 1 if at else ''}}}" for at in range(40)),
    "merged aliases": "a: &a [x, x, x, x]\nb: [" + "*a, " * MOST_YAML_VALUES + "*a]",
    "a list that holds itself": "a: &a [*a]",
    "a mapping that holds itself": "a: &a {b: {c: *a}}",
    "lists in lists": "[" * 20_000,
    "mappings in mappings": "{a: " * 20_000,
    "items in items": "- " * 5_000 + "a",
    "an integer of many digits": "a: " + "9" * 5_000,
    "no date": "a: 2024-99-99",
    "a tag of Python": "a: !!python/object/apply:os.system [echo]",
    "an unknown tag": "a: !x 1",
    "two documents": "a: 1\n---\nb: 2",
    "no alias": "a: *b",
    "a tab": "a:\n\t- b",
    "binary": "a: !!binary ÿ",
    "a key that is a list": "? [a]\n: 1",
    "a control character": "a: [\x00]",
    "an empty integer": "a: !!int ''",
    "an empty number": "a: !!float ''",
    "a time that is none": "a: !!timestamp x",
}


@pytest.mark.parametrize("name", BAD_YAML)
def test_yaml_that_cannot_be_read_is_a_value_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        parse_yaml(BAD_YAML[name])
    path = tmp_path / "tools.yaml"
    path.write_text(BAD_YAML[name], encoding="utf-8")
    with pytest.raises(WrongInput, match="tools.yaml: cannot be read as YAML"):
        read_class_items(str(path), "tools", "class_name: a.B", [])
    with pytest.raises(WrongInput, match="tools.yaml: cannot be read as YAML"):
        read_agent_loops(str(path))


def test_few_aliases_are_fine() -> None:
    text = "usual: &usual {timeout: 3}\ntools: [{config: *usual}, {config: {<<: *usual, retries: 1}}]"
    assert parse_yaml(text)["tools"] == [{"config": {"timeout": 3}}, {"config": {"timeout": 3, "retries": 1}}]
    assert parse_yaml("") is None and parse_yaml("# nothing") is None


def test_texts_that_double_without_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(class_files, "READ_TIMEOUT_S", 0.5)
    path = tmp_path / "tools.yaml"
    path.write_text("a0: x\n" + "\n".join(f"a{at}: ${{a{at - 1}}}${{a{at - 1}}}" for at in range(1, 35)))
    with pytest.raises(WrongInput, match="tools.yaml: its values do not end within 0.5 s"):
        read_class_items(str(path), "tools", "class_name: a.B", [])


@pytest.mark.parametrize("text", DEEP_JSON, ids=range(4))
def test_a_deep_file_of_servers_is_named(text: str, tmp_path: Path) -> None:
    (tmp_path / "servers.json").write_text(text)
    with pytest.raises(WrongInput, match="servers.json: cannot be read as JSON"):
        read_servers(str(tmp_path / "servers.json"))


@pytest.mark.parametrize("text", DEEP_JSON, ids=range(4))
def test_deep_texts_of_rows_are_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the test cases are not JSON"):
        code_tests.read_test_cases(text)
    with pytest.raises(ValueError, match="one JSON argument per line"):
        code_tests.read_test_cases({"inputs": [text], "outputs": ["1"], "fn_name": "f"}).test(0)
    assert not code_tests.is_expected(
        code_tests.read_test_cases({"inputs": ["1"], "outputs": [text], "fn_name": "f"}), 0, "", "1"
    )
    call = {"function": {"name": "f", "arguments": text}}
    assert plain([{"role": "assistant", "tool_calls": [call]}])[0]["tool_calls"][0]["function"]["arguments"] == text
    (tmp_path / "rows.jsonl").write_text(text)
    with pytest.raises(WrongInput, match="rows.jsonl: cannot be read"):
        read_corpus(str(tmp_path / "rows.jsonl"))
    with pytest.raises(ValueError, match="line 1"):
        _json_row(1, text)


@settings(max_examples=200, deadline=None)
@given(value=VALUES)
def test_what_is_written_is_read(value: Any) -> None:
    assert parse_json(json.dumps(value)) == value
    assert parse_yaml(yaml.safe_dump(value)) == value


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(text=st.text("&*a1:-[]{}, \n!?|>'\"<~#%@`", max_size=40))
def test_generated_yaml_ends(text: str) -> None:
    try:
        parse_yaml(text)
    except ValueError as error:
        assert str(error)
