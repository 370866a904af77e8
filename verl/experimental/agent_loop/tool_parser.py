"""Find the tool calls in sampled text.

This module does not import torch, so that the checks before the start can read the names of the formats.

Formats, by the documentation of their models: ``hermes`` (Hermes 2 Pro, Qwen2.5, Qwen3), ``gpt-oss`` (harmony),
``qwen3-coder``, ``llama3-json`` (Llama 3.1 and later) and ``pythonic`` (Llama 3.2 and 4, ToolACE).
"""

import ast
import functools
import inspect
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from verl.base_config import nearest
from verl.errors import WrongInput
from verl.experimental.agent_loop.tool_markup import THINK, ElementCall, Elements, find_calls, split_thought
from verl.experimental.agent_loop.tool_values import decode_at, skip_blanks, typed
from verl.utils.json_types import Json

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schemas = Sequence[Mapping[str, Any]]
"""Tools as OpenAI describes them: ``{type: function, function: {name, description, parameters}}``."""

_NO_JSON = "the call is no complete JSON object"
_NO_ELEMENTS = "the call is no complete <parameter=KEY> ... </parameter></function>, with each KEY once"
_MESSAGE = "<|message|>"
_OWN_LINE = re.compile(r"\n<parameter=([^<>\n]++)>\n")
_LONGEST_OPENING = 32
"""Tokens at the end of a prompt that may open a thought."""


@dataclass(frozen=True)
class FunctionCall:
    """A call as the model wrote it.

    Attributes:
        name: the tool; empty if the call is too broken to tell.
        arguments: JSON text of an object, or the model's text if ``error`` says that it is no JSON object.
        error: what is wrong with the form of the call, to be told to the model; None if nothing is.
    """

    name: str
    arguments: str
    error: str | None = None


Found = tuple[str, list[FunctionCall]]
"""The text without its calls, and the calls in their order."""
Parser = TypeVar("Parser", bound="type[ToolParser]")


class ToolParser:
    """Finds the calls in the tokens of one turn. A call that is broken is returned with its error, never raised.

    A subclass defines ``parse``, or ``extract_tool_calls``, whose ``tools`` and ``prompt_ids`` are optional.
    """

    _registry: ClassVar[dict[str, "type[ToolParser]"]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.parse is ToolParser.parse and cls.extract_tool_calls is ToolParser.extract_tool_calls:
            raise TypeError(f"{cls.__qualname__} finds no calls: give it the method parse or extract_tool_calls")
        own: Any = cls.__dict__.get("extract_tool_calls")
        taken = 3 if own is None else len(inspect.signature(own).parameters) - 2  # besides self and responses_ids
        if taken < 2:

            @functools.wraps(own)
            async def extract(
                self: "ToolParser", responses_ids: Sequence[int], tools: Schemas = (), prompt_ids: Sequence[int] = ()
            ) -> Found:
                found: Found = await own(self, responses_ids, *[tools][:taken])
                return found

            cls.extract_tool_calls = extract  # type: ignore[method-assign]

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    async def extract_tool_calls(
        self, responses_ids: Sequence[int], tools: Schemas = (), prompt_ids: Sequence[int] = ()
    ) -> Found:
        """Return the text of a turn without its calls, and the calls.

        Args:
            tools: the schemas that give arguments without types their types.
            prompt_ids: what the model saw before the turn; it may end with the opening of a thought.
        """
        opening = self._opening(prompt_ids)
        text, calls = self.parse(opening + self.text_of(responses_ids), tools)
        return text.removeprefix(opening), [_encodable(call) for call in calls]

    def _opening(self, prompt_ids: Sequence[int]) -> str:
        """Return the thought's opening tag if the prompt ends with it, else an empty text."""
        end = self._decode(prompt_ids[-_LONGEST_OPENING:])
        return end[end.rindex(THINK) :] if end.rstrip().endswith(THINK) else ""

    def text_of(self, responses_ids: Sequence[int]) -> str:
        """Return the text of a turn with its special tokens, except those that end it."""
        tokens = list(responses_ids)
        special = set(self.tokenizer.all_special_ids)
        while tokens and tokens[-1] in special:
            tokens.pop()
        return self._decode(tokens)

    def _decode(self, tokens: Sequence[int]) -> str:
        given = list(tokens)
        return str(self.tokenizer.decode(given, skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; the base class finds none."""
        return text, []

    @classmethod
    def register(cls, name: str) -> Callable[[Parser], Parser]:
        """Make a parser known under a name, which ``rollout.multi_turn.format`` takes."""

        def decorate(parser: Parser) -> Parser:
            cls._registry[name] = parser
            return parser

        return decorate

    @classmethod
    def names(cls) -> list[str]:
        """Return the names of all parsers of this process."""
        return sorted(cls._registry)


def get_tool_parser(name: str, tokenizer: "PreTrainedTokenizerBase") -> ToolParser:
    """Return a parser by name.

    Raises: WrongInput naming the choices.
    """
    known = ToolParser.names()
    if name not in known:
        raise WrongInput(
            f"actor_rollout_ref.rollout.multi_turn.format={name}: is no parser of tool calls: write one of "
            f"{', '.join(known)} (the nearest: {', '.join(nearest(name, known)) or 'none'})"
        )
    return ToolParser._registry[name](tokenizer)


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """Reads ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several of which may follow each other."""

    _END: ClassVar[re.Pattern[str]] = re.compile(r"</tool_call>|\Z")

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; thoughts hold no call."""

        def read(start: int) -> tuple[FunctionCall, int] | None:
            found = _json_at(text, start, self._END)
            if found is None:
                return None
            value, body, stop = found
            return _call_of_value(value, body, "arguments"), stop

        found = find_calls(text, read, lambda body: FunctionCall(_name_in(body), body.strip(), _NO_JSON))
        return found.kept, found.calls


@ToolParser.register("qwen3-coder")
class Qwen3CoderToolParser(ToolParser):
    """Reads ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``."""

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; a value has the type that its tool gives it."""
        elements = Elements(text)

        def read(start: int) -> tuple[FunctionCall, int] | None:
            found = elements.read(start)
            if found is None:
                return None
            (call, stop), parameters = found, _parameters(found[0].name, tools)
            if _lacks_end(call, parameters):
                return FunctionCall(call.name, text[start:stop].strip(), _NO_ELEMENTS), stop
            arguments = {key: typed(value, key, parameters) for key, value in call.arguments.items()}
            return FunctionCall(call.name, json.dumps(arguments, ensure_ascii=False)), stop

        found = find_calls(text, read, self._broken)
        return found.kept, found.calls

    def _broken(self, body: str) -> FunctionCall:
        name = re.search(r"<function=([^<>\n]++)>", body)
        if name is None:
            return FunctionCall("", body.strip(), "the call has no <function=NAME> ... </function>")
        return FunctionCall(name[1].strip(), body.strip(), _NO_ELEMENTS)


@ToolParser.register("llama3-json")
class Llama3JsonToolParser(ToolParser):
    """Reads ``{"name": ..., "parameters": {...}}`` as the whole response; several stand between semicolons."""

    _START: ClassVar[re.Pattern[str]] = re.compile(r'\A\s*(?=\{\s*"(?:name|type|parameters)")|<\|python_tag\|>')
    _SEPARATOR: ClassVar[re.Pattern[str]] = re.compile(r"[\s;]*")

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; other JSON, as an answer may be, stays text."""
        thought, said = split_thought(text, self._START)
        start = self._START.search(said)
        if start is None:
            return text, []
        has_tag = bool(start[0].strip())
        kept = thought + said[: start.start()]
        position = skip_blanks(said, start.end())
        calls: list[FunctionCall] = []
        while position < len(said):
            try:
                value, first, stop = decode_at(said, position)
            except (ValueError, RecursionError):
                rest = said[position:].rstrip()
                return kept, [*calls, FunctionCall(_name_in(rest), rest, _NO_JSON)]
            if not (has_tag or calls or (isinstance(value, dict) and "name" in value)):
                return text, []
            calls.append(_call_of_value(value, said[first:stop], "parameters"))
            position = self._SEPARATOR.match(said, stop).end()  # type: ignore[union-attr]
        return kept, calls


@ToolParser.register("pythonic")
class PythonicToolParser(ToolParser):
    """Reads ``[name(key=value, ...), ...]`` as the whole response, with values as Python or JSON writes them."""

    _CONSTANTS: ClassVar[dict[str, bool | None]] = {"true": True, "false": False, "null": None}
    _START: ClassVar[re.Pattern[str]] = re.compile(r"\s*(?:<\|python_start\|>\s*)?\[\s*([A-Za-z_][\w.]*)\s*\(")

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; another list stays text."""
        thought, said = split_thought(text, self._START)
        first = self._START.match(said)
        if first is None:
            return text, []
        body = said.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
        broken = FunctionCall(first[1], body, "the calls are no list such as [name(key=value)]")
        try:
            tree = ast.parse(body, mode="eval").body
            if not isinstance(tree, ast.List):
                return thought, [broken]
            return thought, [self._call(node) for node in tree.elts]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return thought, [broken]

    def _call(self, node: ast.expr) -> FunctionCall:
        if not isinstance(node, ast.Call):
            return FunctionCall("", ast.unparse(node), "is no call such as name(key=value)")
        name = ast.unparse(node.func)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return FunctionCall(name, ast.unparse(node), "each argument needs its name: name(key=value)")
        try:
            arguments = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
            written = json.dumps(arguments)
        except (ValueError, TypeError, RecursionError, MemoryError):
            return FunctionCall(name, ast.unparse(node), "an argument is no constant, list or dictionary")
        # As JSON with escapes, whose surrogate pairs are one character, unlike those of Python.
        return FunctionCall(name, json.dumps(json.loads(written), ensure_ascii=False))

    def _value(self, node: ast.expr) -> Json:
        for inner in ast.walk(node):
            for field, child in ast.iter_fields(inner):
                if isinstance(child, list):
                    setattr(inner, field, [self._constant(each) for each in child])
                elif isinstance(child, ast.expr):
                    setattr(inner, field, self._constant(child))
        return ast.literal_eval(self._constant(node))

    def _constant(self, node: ast.expr) -> ast.expr:
        if isinstance(node, ast.Name) and node.id in self._CONSTANTS:
            return ast.copy_location(ast.Constant(self._CONSTANTS[node.id]), node)
        return node


@ToolParser.register("gpt-oss")
class GptOssToolParser(ToolParser):
    """Reads messages of harmony: a call is one to ``functions.NAME``, its body the arguments.

    Source: OpenAI harmony response format. A turn may hold several messages, each
    ``<|start|>HEADER<|message|>BODY<|end|>``; the first has no ``<|start|>``, which belongs to the prompt.
    """

    _END: ClassVar[re.Pattern[str]] = re.compile(r"<\|(?:end|call|return)\|>|(?=<\|start\|>)|\Z")

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return the text of the messages to the user, and the calls; the channel ``analysis`` is skipped."""
        if "<|message|>" not in text:
            return text, []
        said: list[str] = []
        calls: list[FunctionCall] = []
        position = 0
        while (marker := text.find(_MESSAGE, position)) != -1:
            header = text[position:marker].rpartition("<|start|>")[2]
            start = marker + len(_MESSAGE)
            recipient = re.search(r"\bto=(\S+?)(?=[\s<]|$)", header)
            whole = None if recipient is None else _json_at(text, start, self._END)
            if whole is not None:
                body, position = whole[1:]
            else:
                end = self._END.search(text, start)
                assert end is not None  # the end of the text counts as an end
                body = text[start : end.start()]
                position = end.end()
            if recipient is not None:
                calls.append(_call_with(recipient[1].removeprefix("functions."), body.strip()))
            elif not re.search(r"<\|channel\|>\s*analysis", header):
                said.append(body)
        return "\n".join(said), calls


def _json_at(text: str, start: int, end: re.Pattern[str]) -> tuple[Json, str, int] | None:
    """Return the JSON value that begins at a place, its text, and where the ``end`` after it stops.

    None if there is no such value, or something else follows it.
    """
    try:
        value, first, stop = decode_at(text, start)
    except (ValueError, RecursionError):
        return None
    closing = end.match(text, skip_blanks(text, stop))
    return None if closing is None else (value, text[first:stop], closing.end())


def _encodable(call: FunctionCall) -> FunctionCall:
    """Return a call without half a surrogate pair, which escapes of JSON can write and no tokenizer can encode."""
    try:
        value = call.arguments if call.error is not None else json.loads(call.arguments)
        json.dumps([call.name, call.arguments, value], ensure_ascii=False).encode()
    except UnicodeEncodeError:
        name, arguments = (text.encode(errors="replace").decode() for text in (call.name, call.arguments))
        return FunctionCall(name, arguments, "the call holds half a surrogate pair")
    except (ValueError, RecursionError):
        return FunctionCall(call.name, call.arguments, call.error or "the arguments are nested too deeply")
    return call


def _call_of_value(value: Json, body: str, arguments_key: str) -> FunctionCall:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not value["name"]:
        return FunctionCall("", body, f'the call needs the keys "name" and "{arguments_key}"')
    arguments = value.get(arguments_key, {})
    if isinstance(arguments, str):  # some models write the object as text
        return _call_with(value["name"], arguments)
    written = json.dumps(arguments, ensure_ascii=False)
    if not isinstance(arguments, dict):
        return FunctionCall(value["name"], written, f'"{arguments_key}" is no JSON object')
    return FunctionCall(value["name"], written)


def _call_with(name: str, arguments: str) -> FunctionCall:
    try:
        if isinstance(json.loads(arguments), dict):
            return FunctionCall(name, arguments)
    except (ValueError, RecursionError):
        pass
    return FunctionCall(name, arguments, "the arguments are no complete JSON object")


def _name_in(broken: str) -> str:
    """Return the name of a call whose JSON is broken, or nothing."""
    match = re.search(r'"name"\s*:\s*"([^"\\]+)"', broken)
    return match[1] if match else ""


def _parameters(name: str, tools: Schemas) -> Json:
    """Return the schema of the parameters of a tool; None if there is none."""
    functions = (tool.get("function", {}) for tool in tools)
    return next((each.get("parameters") for each in functions if each.get("name") == name), None)


def _lacks_end(call: ElementCall, parameters: Json) -> bool:
    """Whether another argument of the tool begins within an argument's text: the model left out ``</parameter>``."""
    declared = parameters.get("properties") if isinstance(parameters, Mapping) else None
    missing = set(declared) - set(call.arguments) if isinstance(declared, Mapping) else set()
    return any(
        value.count("<parameter=") > value.count("</parameter>") and not missing.isdisjoint(_OWN_LINE.findall(value))
        for value in call.arguments.values()
    )
