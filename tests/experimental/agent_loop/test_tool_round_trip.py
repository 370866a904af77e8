"""Whatever values a format can hold survive: the template writes a call, its tokens are sampled, the parser reads them.

``HOLDS`` lists for each format what it cannot hold.
"""

import asyncio
import json
import re
from collections.abc import Callable
from keyword import iskeyword
from typing import Any
from unicodedata import normalize

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from examples.tiny_model import byte_tokenizer
from tests.utils.chat.formats import FORMATS, make_tokenizer
from verl.experimental.agent_loop.tool_parser import get_tool_parser
from verl.utils.chat import ChatFormat, written_turn
from verl.utils.chat.others import CUT

Arguments = dict[str, Any]
TAGS = {
    "hermes": ["<tool_call>", "</tool_call>", '{"name": "f", "arguments": {}}'],
    "qwen3-coder": ["<tool_call>", "</tool_call>", "<function=f>", "</function>", "<parameter=a>", "</parameter>"],
    "llama3-json": ["<|python_tag|>", ";", '{"name": "f", "parameters": {}}', '{"name":'],
    "pythonic": ["<|python_start|>", "<|python_end|>", "[f(a=1)]", ")", "f(", "a=1", ", "],
    "gpt-oss": ["<|start|>", "<|message|>", "<|end|>", "<|call|>", "<|channel|>analysis", "to=functions.f"],
}
COMMON = [
    "<think>",
    "</think>",
    "\n",
    '"',
    "'",
    "\\",
    "\\n",
    "{",
    "}",
    "[",
    "]",
    " ",
    "null",
    "7",
    "true",
    "é",
    "数",
    "🙂",
]
NESTED = r"</parameter>\s*<parameter=|<tool_call>\s*<function="
"""Texts that qwen3-coder may read as another argument or call, since it escapes nothing."""


def _is_python_name(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name) and name not in ("true", "false", "null")


HOLDS: dict[str, Callable[[Arguments], bool]] = {
    "hermes": lambda arguments: True,
    "llama3-json": lambda arguments: True,
    "gpt-oss": lambda arguments: True,
    # Names of arguments are those of Python, which makes some characters one: ﬁ is fi.
    "pythonic": lambda arguments: all(_is_python_name(name) and normalize("NFKC", name) == name for name in arguments),
    "qwen3-coder": lambda arguments: all(
        re.fullmatch(r"[^<>\n]+", name) and name == name.strip() and not re.search(NESTED, _written(value))
        for name, value in arguments.items()
    ),
}


def _written(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def texts(name: str) -> st.SearchStrategy[str]:
    characters = st.text(st.characters(exclude_categories=["Cs"]), max_size=4)  # half a surrogate pair has no bytes
    return st.lists(st.sampled_from([*TAGS[name], *COMMON]) | characters, max_size=7).map("".join)


def values(name: str) -> st.SearchStrategy[Any]:
    numbers = st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    return st.recursive(
        st.none() | st.booleans() | numbers | texts(name),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts(name), inner, max_size=3),
        max_leaves=5,
    )


def calls(name: str) -> st.SearchStrategy[list[Arguments]]:
    names = (
        st.from_regex(r"[a-z_][a-z0-9_]{0,4}", fullmatch=True) | st.sampled_from(["/", "a=b", "=", "ü-1"]) | texts(name)
    )
    arguments = st.dictionaries(names, values(name), max_size=3).filter(HOLDS[name])
    return st.lists(arguments, min_size=1, max_size=3 if name in ("hermes", "qwen3-coder", "pythonic") else 1)


def schema_of(arguments: Arguments) -> dict[str, Any]:
    kinds = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}
    properties = {name: {"type": kinds.get(type(value), "null")} for name, value in arguments.items()}
    return {"type": "object", "properties": properties}


def tools_of(made: list[Arguments]) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": f"f{at}", "description": "f", "parameters": schema_of(each)}}
        for at, each in enumerate(made)
    ]


def read(name: str, tokenizer: Any, tokens: list[int], made: list[Arguments]) -> None:
    found = asyncio.run(get_tool_parser(name, tokenizer).extract_tool_calls(tokens, tools_of(made)))[1]
    assert [call.error for call in found] == [None] * len(made), found
    assert [call.name for call in found] == [f"f{at}" for at in range(len(made))]
    for call, arguments in zip(found, made, strict=True):
        assert json.dumps(json.loads(call.arguments)) == json.dumps(arguments)  # equal, and of equal types


TEMPLATES = {
    "qwen2_5": "hermes",
    "qwen3": "hermes",
    "hermes": "hermes",
    "qwen3_coder": "qwen3-coder",
    "llama3_1": "llama3-json",
    "llama4": "pythonic",
    "gpt_oss": "gpt-oss",
}


@pytest.mark.parametrize("template", TEMPLATES)
@settings(max_examples=25, deadline=None, derandomize=True)
@given(data=st.data())
def test_values_survive_the_template(template: str, data: st.DataObject) -> None:
    name = TEMPLATES[template]
    made = data.draw(calls(name))
    assume(CUT not in json.dumps(made, ensure_ascii=False))  # two noncharacters, with which templates mark texts
    chat = ChatFormat(make_tokenizer(next(form for form in FORMATS if form.name == template)))
    written = [
        {"id": f"call{at:05d}", "type": "function", "function": {"name": f"f{at}", "arguments": each}}
        for at, each in enumerate(made)
    ]
    turn = {"role": "assistant", "content": "", "tool_calls": written}
    read(name, chat.tokenizer, written_turn(chat, [{"role": "user", "content": "a"}, turn]), made)


def as_python_writes(arguments: list[Arguments]) -> str:
    """Calls as some templates of qwen3-coder write them: True and None, not true and null, and no line breaks."""
    written = ""
    for at, each in enumerate(arguments):
        written += f"<tool_call><function=f{at}>"
        for name, value in each.items():
            text = _written(value) if isinstance(value, list | dict) else str(value)
            written += f"<parameter={name}>{text}</parameter>"
        written += "</function></tool_call>"
    return written.removesuffix("</tool_call>")  # where generation stops


@settings(max_examples=40, deadline=None, derandomize=True)
@given(made=calls("qwen3-coder"))
def test_constants_of_python(made: list[Arguments]) -> None:
    kept = [
        {key: value.strip("\n") if isinstance(value, str) else value for key, value in each.items()} for each in made
    ]
    assume(not any("parameter" in _written(value) for each in kept for value in each.values()))
    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode(as_python_writes(kept), add_special_tokens=False)
    read("qwen3-coder", tokenizer, tokens, kept)


@pytest.mark.parametrize(
    "value",
    [
        "</parameter>\n</function>\n</tool_call>",
        "</parameter></function></tool_call> and more",
        "<tool_call>\n<function=g>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "<tool_call><function=g><parameter=a>1</parameter><parameter=b>2</parameter></function></tool_call>" * 3,
        "<tool_call><tool_call></tool_call>",
        "<parameter=a>",
        "<think>",
        "x</think>",
    ],
)
def test_qwen3_coder_reads_arguments_that_quote_calls(value: str) -> None:
    tokenizer = byte_tokenizer()
    for more in ({}, {"b": 2}):
        made = [{"a": value, **more}, {"c": "plain"}]
        text = "Hm.\n<think>no <tool_call></think>" + as_python_writes(made)
        read("qwen3-coder", tokenizer, tokenizer.encode(text, add_special_tokens=False), made)
