"""Convert arguments that a format writes as untyped text, by the schema of their tool."""

import functools
import json
import math
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, Any

from verl.utils.json_types import Json

if TYPE_CHECKING:
    from jsonschema.exceptions import ValidationError
    from jsonschema.protocols import Validator
    from referencing import Registry

_WORDS = {"true": True, "false": False, "null": None, "none": None}
"""Constants of JSON and Python: chat templates write some of each."""
_PYTHON_TYPES = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "list": "array",
    "dict": "object",
    "None": "null",
}
"""Names of Python that authors of schemas write as types."""

_BLANKS = re.compile(r"\s*")
_FIRST_WINDOW = 1024
_LONGEST_TOKEN = 16
"""Characters of a constant or an escape of JSON, with room to spare."""


def _refused(name: str) -> Json:
    raise ValueError(f"{name} is no JSON value")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


_DECODER = json.JSONDecoder()
_STRICT = json.JSONDecoder(parse_constant=_refused, parse_float=_finite)
"""Reads JSON without NaN and infinities, which ``json`` takes and the standard does not."""


def skip_blanks(text: str, start: int) -> int:
    """Return the place of the first character from ``start`` on that is no blank."""
    match = _BLANKS.match(text, start)
    return start if match is None else match.end()


def decode_at(text: str, start: int) -> tuple[Json, int, int]:
    """Return the JSON value at a place, after blanks, and where it starts and stops; the text may go on after it.

    It reads windows of the text, since an error of ``json`` counts all lines before it: in a text of thousands of
    broken values that takes minutes.

    Raises: ValueError, or RecursionError, if no JSON value stands there.
    """
    first = skip_blanks(text, start)
    size = _FIRST_WINDOW
    while True:
        window = text[first : first + size]
        try:
            value, length = _DECODER.raw_decode(window)
        except json.JSONDecodeError as error:
            is_cut = error.pos > len(window) - _LONGEST_TOKEN or error.msg.startswith("Unterminated string")
            if not is_cut or first + size >= len(text):
                raise
            size *= 2
        else:
            return value, first, first + length


def typed(text: str, key: str, parameters: Json) -> Json:
    """Convert the text of an argument to the type in the schema; return the text if the schema accepts nothing else.

    A text that the schema accepts stays text, except ``null`` where the schema accepts null. Any other text is read
    as JSON if the schema accepts the result.

    Args: ``parameters`` is the schema of all arguments; clients of the endpoint may send something else.
    """
    if not isinstance(parameters, Mapping):
        return text
    if text == "null" and _accepts(parameters, key, None):
        return None
    if _accepts(parameters, key, text):
        return text
    value = _read(text)
    return text if isinstance(value, str) or not _accepts(parameters, key, value) else value


def _read(text: str) -> Json:
    """Return the value of a text that is JSON or a constant of Python; else the text."""
    word = text.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return _STRICT.decode(text)
    except (ValueError, RecursionError):
        return text


def _accepts(parameters: Mapping[str, Json], key: str, value: Json) -> bool:
    """Whether a schema accepts a value of one argument; its rules for other arguments do not count.

    A schema with a mistake accepts texts and nothing else.
    """
    validator, registry = _validator()
    try:
        errors = validator(dict(parameters), registry=registry).iter_errors({key: value})
        return not any(_concerns(error, key) for error in errors)
    except Exception:  # jsonschema raises what the mistake leads to: AttributeError, re.error, RecursionError, ...
        return isinstance(value, str)


def _concerns(error: "ValidationError", key: str) -> bool:
    """Whether an error of validation is about an argument: not about a missing one, for instance."""
    if error.path:
        return bool(error.path[0] == key)
    if error.validator not in ("anyOf", "oneOf"):
        return False
    branches = groupby(error.context, lambda inner: inner.schema_path[0])
    return all(any(_concerns(inner, key) for inner in branch) for _, branch in branches)


@functools.cache
def _validator() -> "tuple[type[Validator], Registry[Any]]":
    """Return the class that validates, and a registry that reads no schema from files or the network.

    One branch of ``oneOf`` is enough, since branches such as integer and number overlap. ``nullable`` of OpenAPI and
    the type names of Python are known.
    """
    from jsonschema import Draft202012Validator, validators
    from referencing import Registry

    usual = Draft202012Validator.TYPE_CHECKER
    types = usual.redefine_many(
        {alias: lambda _, value, name=name: usual.is_type(value, name) for alias, name in _PYTHON_TYPES.items()}
    )
    has_type = Draft202012Validator.VALIDATORS["type"]

    def has_type_or_is_null(
        validator: "Validator", wanted: Json, value: Json, schema: Mapping[str, Json]
    ) -> "Iterator[ValidationError]":
        if value is not None or schema.get("nullable") is not True:
            yield from has_type(validator, wanted, value, schema)

    checks = {"type": has_type_or_is_null, "oneOf": Draft202012Validator.VALIDATORS["anyOf"]}
    return validators.extend(Draft202012Validator, checks, type_checker=types), Registry()
