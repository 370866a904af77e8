"""The types of arguments that are written as text."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from verl.experimental.agent_loop.tool_values import typed

INTEGER, TEXT, NULL = {"type": "integer"}, {"type": "string"}, {"type": "null"}
DEFS = {"Count": INTEGER, "Maybe": {"anyOf": [{"$ref": "#/$defs/Count"}, NULL]}, "a/b~c": {"const": 3}}


def value(schema: Any, text: str) -> Any:
    return typed(text, "x", {"type": "object", "properties": {"x": schema, "y": INTEGER}, "$defs": DEFS})


CASES = [
    (INTEGER, "7", 7),
    (INTEGER, " 7\n", 7),
    (INTEGER, "7.0", 7.0),
    (INTEGER, "7.5", "7.5"),
    (INTEGER, "seven", "seven"),
    (INTEGER, "null", "null"),
    (INTEGER, '"7"', '"7"'),
    ({"type": "number"}, "1e999", "1e999"),
    ({"type": "number"}, "NaN", "NaN"),
    ({"type": "boolean"}, "True", True),
    (TEXT, "7", "7"),
    (TEXT, "null", "null"),
    ({"type": ["integer", "null"]}, "7", 7),
    ({"type": ["integer", "null"]}, "None", None),
    ({"type": ["integer", "string"]}, "7", "7"),
    ({"anyOf": [INTEGER, NULL]}, "null", None),
    ({"anyOf": [TEXT, NULL]}, "null", None),
    ({"anyOf": [TEXT, NULL]}, "None", "None"),
    ({"anyOf": [TEXT, INTEGER]}, "7", "7"),
    ({"anyOf": [{"anyOf": [INTEGER, {"type": "array", "items": TEXT}]}, NULL]}, '["a"]', ["a"]),
    ({"oneOf": [INTEGER, {"type": "number"}]}, "7", 7),  # both accept it
    ({"allOf": [INTEGER, {"minimum": 3}]}, "7", 7),
    ({"allOf": [{"$ref": "#/$defs/Count"}], "description": "d"}, "7", 7),
    ({"$ref": "#/$defs/Maybe"}, "null", None),
    ({"$ref": "#/$defs/a~1b~0c"}, "3", 3),
    ({"$ref": "#/properties/y"}, "7", 7),
    ({"$ref": "#/$defs/lost"}, "7", "7"),
    ({"$ref": "https://example.org/schema.json"}, "7", "7"),  # nobody reads it
    ({"enum": [1, 2, None]}, "2", 2),
    ({"enum": [1, 2, None]}, "null", None),
    ({"enum": ["1", 1]}, "1", "1"),
    ({"enum": ["a", 1]}, "b", "b"),
    ({"const": {"a": None}}, '{"a": null}', {"a": None}),
    ({"type": "array", "items": INTEGER}, "[1, null]", "[1, null]"),
    ({"type": "object", "additionalProperties": INTEGER}, '{"a": 1}', {"a": 1}),
    ({"type": "integer", "nullable": True}, "null", None),
    ({"type": "int"}, "7", 7),
    ({"type": "dict"}, '{"a": [1.5, "ü"]}', {"a": [1.5, "ü"]}),
    ({"type": "whatever"}, "7", "7"),
    ({"type": 3}, "null", "null"),
    ({"pattern": "("}, "7", "7"),
    ({"description": "no type"}, "7", "7"),
    ({"description": "no type"}, "null", None),
    (True, "7", "7"),
    (None, "7", "7"),
]


@pytest.mark.parametrize(("schema", "text", "expected"), CASES)
def test_a_text_has_the_type_of_its_schema(schema: Any, text: str, expected: Any) -> None:
    got = value(schema, text)
    assert got == expected and type(got) is type(expected)


def test_the_schema_of_all_arguments_may_be_anything() -> None:
    one, other = {"properties": {"x": INTEGER}, "required": ["z"]}, {"properties": {"x": NULL}}
    assert typed("7", "x", {"anyOf": [one, other]}) == 7
    assert typed("null", "x", {"oneOf": [one, other]}) is None
    assert typed("7", "x", {"allOf": [{"$ref": "#/$defs/one"}], "$defs": {"one": one}}) == 7
    assert typed("7", "x", {"additionalProperties": INTEGER}) == 7
    assert typed("7", "x", {"patternProperties": {"^x": INTEGER}, "additionalProperties": TEXT}) == 7
    assert typed("7", "x", {"properties": {}, "additionalProperties": False}) == "7"
    for nothing in (None, [], "all", {"properties": [1]}, {"properties": {"x": "integer"}}):
        assert typed("7", "x", nothing) == "7"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
WRAPS: list[Any] = [
    lambda schema: schema,
    lambda schema: {"anyOf": [NULL, schema]},
    lambda schema: {"oneOf": [schema, {"type": "array", "items": False, "minItems": 9}]},
    lambda schema: {"allOf": [{"description": "d"}, {"anyOf": [schema]}]},
    lambda schema: {"$ref": "#/properties/z", "z": schema},
]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(JSON, st.sampled_from(WRAPS), st.booleans())
def test_values_survive_any_schema_that_says_their_type(given: Any, wrap: Any, is_exact: bool) -> None:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
    schema = {"const": given} if is_exact else {"type": kinds.get(type(given), "null")}
    parameters = {"properties": {"x": wrap(schema), "z": schema}}
    written = given if isinstance(given, str) else json.dumps(given)
    if isinstance(given, str) and given == "null" and wrap is WRAPS[1]:
        return  # where both are accepted, it is null
    got = typed(written, "x", parameters)
    assert json.dumps(got) == json.dumps(given)
