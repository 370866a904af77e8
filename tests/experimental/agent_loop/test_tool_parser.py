"""Tool calls in the formats of several models, whole and broken."""

import asyncio
import json
import time
from typing import Any

import pytest

from examples.tiny_model import SPECIAL_TOKENS, byte_tokenizer
from verl.errors import WrongInput
from verl.experimental.agent_loop.tool_parser import FunctionCall, ToolParser, get_tool_parser

HARMONY = ["<|start|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "find",
            "parameters": {
                "properties": {
                    "text": {"type": "string"},
                    "most": {"type": "integer"},
                    "deep": {"type": ["boolean", "null"]},
                    "tags": {"type": "array"},
                }
            },
        },
    }
]


def parse(name: str, text: str, end: str = "<|end|>") -> tuple[str, list[FunctionCall]]:
    tokenizer = byte_tokenizer(special_tokens=[*SPECIAL_TOKENS, *HARMONY])
    tokens = tokenizer.encode(text + end, add_special_tokens=False)
    return asyncio.run(get_tool_parser(name, tokenizer).extract_tool_calls(tokens, TOOLS))


def whole(calls: list[FunctionCall]) -> list[tuple[str, Any]]:
    assert all(call.error is None for call in calls), calls
    return [(call.name, json.loads(call.arguments)) for call in calls]


FIND = ("find", {"text": "é\n</b>", "most": 3})
WHOLE = {
    "hermes": 'Hm.\n<tool_call>\n{"name": "find", "arguments": {"text": "é\\n</b>", "most": 3}}\n</tool_call>',
    "qwen3-coder": "Hm.\n<tool_call>\n<function=find>\n<parameter=text>\né\n</b>\n</parameter>\n<parameter=most>\n3\n"
    "</parameter>\n</function>\n</tool_call>",
    "llama3-json": '{"name": "find", "parameters": {"text": "é\\n</b>", "most": 3}}',
    "pythonic": "[find(text='é\\n</b>', most=3)]",
    "gpt-oss": "<|channel|>analysis<|message|>to=functions.no<|end|><|start|>assistant<|channel|>commentary<|message|>"
    "Hm.\n<|end|><|start|>assistant<|channel|>commentary to=functions.find <|constrain|>json<|message|>"
    '{"text": "é\\n</b>", "most": 3}',
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_call(name: str) -> None:
    text, calls = parse(name, WHOLE[name], "<|call|>" if name == "gpt-oss" else "<|end|>")
    assert whole(calls) == [FIND]
    assert text == ("" if name in ("llama3-json", "pythonic") else "Hm.\n")
    assert parse(name, "The answer is [3] or {3}.") == ("The answer is [3] or {3}.", [])
    assert parse(name, "") == ("", [])


BROKEN = [
    ("hermes", '<tool_call>{"name": "find", "arguments": {"te', "find", "no complete JSON"),
    ("hermes", "<tool_call>find(3)</tool_call>", "", "no complete JSON"),
    ("hermes", "<tool_call>[3]</tool_call>", "", '"name" and "arguments"'),
    ("hermes", '<tool_call>{"name": 3}</tool_call>', "", '"name" and "arguments"'),
    ("hermes", '<tool_call>{"name": "find", "arguments": [3]}</tool_call>', "find", "no JSON object"),
    ("hermes", '<tool_call>{"name": "find", "arguments": "x"}</tool_call>', "find", "no complete JSON"),
    ("hermes", "<tool_call>" + "[" * 100_000, "", "no complete JSON"),
    ("qwen3-coder", "<tool_call>find</tool_call>", "", "<function=NAME>"),
    ("qwen3-coder", "<tool_call><function=find><parameter=text>a", "find", "no complete <parameter"),
    ("qwen3-coder", "<tool_call><function=find><parameter=text>a</parameter>", "find", "no complete <parameter"),
    ("qwen3-coder", "<tool_call><function=find><parameter=a>1</parameter><parameter=a>", "find", "each KEY once"),
    (
        "qwen3-coder",
        "<tool_call>\n<function=find>\n<parameter=text>\na\n<parameter=most>\n3\n</parameter>\n</function>\n</tool_call>",
        "find",
        "no complete <parameter",
    ),
    ("llama3-json", '{"name": "find", "parameters": {', "find", "no complete JSON"),
    ("llama3-json", '<|python_tag|>{"nam": "find"}', "", '"name" and "parameters"'),
    ("llama3-json", "<|python_tag|>find(3)", "", "no complete JSON"),
    ("pythonic", "[find(text='a'", "find", "no list"),
    ("pythonic", "[find('a')]", "find", "needs its name"),
    ("pythonic", "[find(**{'text': 'a'})]", "find", "needs its name"),
    ("pythonic", "[find(text=open('a'))]", "find", "no constant"),
    ("pythonic", "[find(text={1, 2})]", "find", "no constant"),
    ("pythonic", "[find(text='a'), 3]", "find", "is no call"),
    ("pythonic", "[find(text=" + "[" * 5000, "find", "no list"),
    ("pythonic", "[find(text=" + "-" * 400 + "1)]", "find", "no list"),
    ("pythonic", "[find" + ".a" * 900 + "(x=1)]", "find" + ".a" * 900, "no list"),
    ("hermes", '<tool_call>{"name": "find", "arguments": {"a": "\\ud83d"}}</tool_call>', "find", "surrogate"),
    ("hermes", '<tool_call>{"name": "f\\ud83d", "arguments": {}}</tool_call>', "f?", "surrogate"),
    ("gpt-oss", '<|channel|>commentary to=functions.find<|message|>{"a": "\\ud83d"}', "find", "surrogate"),
    ("gpt-oss", '<|channel|>commentary to=functions.find<|message|>{"te', "find", "no complete JSON"),
    ("gpt-oss", "<|channel|>commentary to=functions.find<|message|>3", "find", "no complete JSON"),
]


@pytest.mark.parametrize(("name", "text", "tool", "error"), BROKEN)
def test_a_broken_call_has_its_error(name: str, text: str, tool: str, error: str) -> None:
    calls = parse(name, text)[1]
    assert calls[0].name == tool
    assert error in (calls[-1].error or "")


def test_a_broken_call_swallows_no_other() -> None:
    whole_call = WHOLE["qwen3-coder"].removeprefix("Hm.\n")
    broken = whole_call.replace("</parameter>", "")
    for calls in (parse("qwen3-coder", broken + whole_call)[1], parse("qwen3-coder", f"{whole_call}{broken}")[1]):
        assert sorted(call.error is None for call in calls) == [False, True]
        assert [call.name for call in calls] == ["find", "find"]
    hermes = WHOLE["hermes"].removeprefix("Hm.\n")
    calls = parse("hermes", hermes.replace("}}", "}") + hermes)[1]
    assert [call.error is None for call in calls] == [False, True]


def test_several_calls() -> None:
    hermes = '<tool_call>{"name": "a"}</tool_call>and<tool_call>{"name": "b", "arguments": "{\\"c\\": 1}"}</tool_call>.'
    text, calls = parse("hermes", hermes)
    assert text == "and." and whole(calls) == [("a", {}), ("b", {"c": 1})]
    llama = '<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {"c": [1]}}'
    assert whole(parse("llama3-json", llama)[1]) == [("a", {}), ("b", {"c": [1]})]
    pythonic = "<|python_start|>[a(), lib.b(c=[true, {'d': null}], e=-1.5)]<|python_end|>"
    assert whole(parse("pythonic", pythonic)[1]) == [("a", {}), ("lib.b", {"c": [True, {"d": None}], "e": -1.5})]
    harmony = (
        " to=functions.a<|channel|>commentary json<|message|>{}<|call|><|start|>assistant to=functions.b"
        '<|channel|>commentary<|message|>{"c": 1}'
    )
    assert whole(parse("gpt-oss", harmony, "<|call|>")[1]) == [("a", {}), ("b", {"c": 1})]
    assert parse("gpt-oss", "<|channel|>final<|message|>Four.", "<|return|>") == ("Four.", [])
    assert parse("llama3-json", '{"type": "square", "side": 3}')[1] == []


@pytest.mark.parametrize("name", ["hermes", "qwen3-coder"])
def test_thoughts_hold_no_calls(name: str) -> None:
    call = WHOLE[name].removeprefix("Hm.\n")
    for thought in (f"<think>I could {call}.</think>", f"from the prompt on: {call}</think>"):
        assert parse(name, thought) == (thought, [])
        text, calls = parse(name, thought + call)
        assert text == thought and whole(calls) == [FIND]
    assert parse(name, f"<think>{call}") == (f"<think>{call}", [])
    text, calls = parse(name, f"{call}<think>{call}")
    assert text == f"<think>{call}" and whole(calls) == [FIND]


@pytest.mark.parametrize("name", ["llama3-json", "pythonic"])
def test_a_call_may_follow_a_thought(name: str) -> None:
    call, inner = WHOLE[name], WHOLE[name].replace("é", "</think>")
    for thought in (f"<think>{call}<|python_tag|>{call}</think>", "from the prompt on</think>\n"):
        text, calls = parse(name, thought + call)
        assert text.strip() == thought.strip() and whole(calls) == [FIND]
        assert parse(name, thought) == (thought, [])
        assert whole(parse(name, thought + inner)[1]) == [("find", {"text": "</think>\n</b>", "most": 3})]
    assert whole(parse(name, inner)[1]) == [("find", {"text": "</think>\n</b>", "most": 3})]
    assert parse(name, f"<think>{call}") == (f"<think>{call}", [])


@pytest.mark.parametrize("name", [name for name in WHOLE if name != "gpt-oss"])
def test_the_prompt_may_open_a_thought(name: str) -> None:
    """The template of a thinking model does. A turn that never closes the thought calls nothing."""
    tokenizer = byte_tokenizer(special_tokens=[*SPECIAL_TOKENS, *HARMONY])
    parser = get_tool_parser(name, tokenizer)
    call = WHOLE[name].removeprefix("Hm.\n")

    def found(prompt: str, text: str) -> tuple[str, list[FunctionCall]]:
        ids = [tokenizer.encode(each, add_special_tokens=False) for each in (text, prompt)]
        return asyncio.run(parser.extract_tool_calls(ids[0], TOOLS, ids[1]))

    for prompt in ("<|user|>a<|assistant|>\n<think>\n", "<|assistant|><think>"):
        assert found(prompt, call) == (call, [])
        text, calls = found(prompt, f"I could {call}.</think>\n{call}")
        assert text.strip() == f"I could {call}.</think>" and whole(calls) == [FIND]
    for prompt in ("<|user|>What is <think>?<|assistant|>\n", "<|assistant|><think>\n\n</think>\n\n", ""):
        assert whole(found(prompt, call)[1]) == [FIND]


def test_texts_are_not_tidied() -> None:
    """Some tokenizers, that of Llama 3 for instance, take blanks before commas and full stops out of decoded text."""
    tokenizer = byte_tokenizer()
    tokenizer.clean_up_tokenization_spaces = True
    text = json.dumps({"name": "find", "parameters": {"text": "a , b . do n't"}})
    tokens = tokenizer.encode(text, add_special_tokens=False)
    calls = asyncio.run(get_tool_parser("llama3-json", tokenizer).extract_tool_calls(tokens))[1]
    assert whole(calls) == [("find", {"text": "a , b . do n't"})]


def test_values_have_the_types_of_their_tool() -> None:
    def call(key: str, value: str) -> Any:
        text = f"<tool_call><function=find><parameter={key}>{value}</parameter></function></tool_call>"
        return whole(parse("qwen3-coder", text)[1])[0][1][key]

    assert call("text", "3") == "3" and call("other", "3") == "3"
    assert call("most", "3") == 3 and call("most", "three") == "three"
    assert call("deep", "True") is True and call("tags", '["a"]') == ["a"]


@pytest.mark.parametrize("parameters", [None, [], "all", {"properties": [1]}, {"properties": {"text": None}}])
def test_schemas_that_are_none_give_no_types(parameters: Any) -> None:
    """A client of the endpoint sends what it likes."""
    tools = [{"type": "function", "function": {"name": "find", "parameters": parameters}}]
    text = "<tool_call><function=find><parameter=text>3</parameter></function></tool_call>"
    parser = get_tool_parser("qwen3-coder", byte_tokenizer())
    assert whole(parser.parse(text, tools)[1]) == [("find", {"text": "3"})]


REPEATED = ["<tool_call>", "<think>", "[", "<tool_call><function=f>", "<parameter=a>", "<function=a", "<function=\n"]
REPEATED += ["<|start|>", "<|message|>", '{"name": "f", "parameters": {}};', "[f(a=", "f(a=1),", "-", "to="]
REPEATED += ["<think></think><tool_call></tool_call>", "<parameter=a\n>"]


@pytest.mark.parametrize("name", WHOLE)
def test_a_model_that_repeats_itself_is_read_quickly(name: str) -> None:
    """While a parser reads, no other trajectory of its process goes on."""
    parser = get_tool_parser(name, byte_tokenizer())
    for text in REPEATED:
        for opening in ("", "<tool_call><function=f>", "<tool_call>"):
            spent = []
            for count in (2_000, 20_000):
                started = time.process_time()
                parser.parse(f"{opening}{text * count}>", TOOLS)
                spent.append(time.process_time() - started)
            # Ten times the text takes ten times as long, not a hundred times; a slow machine is slow at both.
            assert spent[1] < 40 * max(spent[0], 0.05), (opening, text, spent)


def test_names() -> None:
    assert set(WHOLE) <= set(ToolParser.names())
    with pytest.raises(WrongInput, match=r"multi_turn.format=herms: .* gpt-oss.* \(the nearest: hermes\)"):
        get_tool_parser("herms", byte_tokenizer())

    @ToolParser.register("shout")
    class Shout(ToolParser):
        def parse(self, text: str, tools: Any = ()) -> tuple[str, list[FunctionCall]]:
            return text.upper(), []

    assert parse("shout", "a") == ("A", [])
    del ToolParser._registry["shout"]


def test_a_parser_that_takes_no_schemas() -> None:
    """Parsers written for the established interface have one method with one argument."""

    class Shouts(ToolParser):
        async def extract_tool_calls(self, responses_ids: Any) -> Any:
            return "", [FunctionCall(name=self.text_of(responses_ids), arguments="{}")]

    tokenizer = byte_tokenizer()
    tokens = tokenizer.encode("find", add_special_tokens=False)
    found = asyncio.run(Shouts(tokenizer).extract_tool_calls(tokens, [{"function": {}}], tokens))
    assert found == ("", [FunctionCall("find", "{}")])

    class Counts(ToolParser):
        async def extract_tool_calls(self, responses_ids: Any, tools: Any = ()) -> Any:
            return "", [FunctionCall(name=str(len(tools)), arguments="{}")]

    counted = asyncio.run(Counts(tokenizer).extract_tool_calls(tokens, [{"function": {}}], tokens))
    assert counted == ("", [FunctionCall("1", "{}")])
    with pytest.raises(TypeError, match="Silent finds no calls"):
        type("Silent", (ToolParser,), {})
