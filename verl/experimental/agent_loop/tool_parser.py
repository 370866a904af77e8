"""Find the tool calls in what a model sampled. Nothing here imports torch: the checks before the start read the names.

Formats, by the documentation of their models: ``hermes`` (Hermes 2 Pro, Qwen2.5, Qwen3), ``gpt-oss`` (harmony),
``qwen3-coder``, ``llama3-json`` (Llama 3.1 and later) and ``pythonic`` (Llama 3.2 and 4, ToolACE).
"""

import ast
import functools
import inspect
import json
import re
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from verl.base_config import WrongInput, nearest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Schemas = Sequence[Mapping[str, Any]]
"""Tools as OpenAI describes them: ``{type: function, function: {name, description, parameters}}``."""

_NO_JSON = "the call is no complete JSON object"


@dataclass(frozen=True)
class FunctionCall:
    """A call as the model wrote it.

    Attributes:
        name: the tool; empty if the call is too broken to tell.
        arguments: JSON text of an object, or what stands in its place if ``error`` says that it is none.
        error: what is wrong with the form of the call, to be told to the model; None if nothing is.
    """

    name: str
    arguments: str
    error: str | None = None


Found = tuple[str, list[FunctionCall]]
"""The text without its calls, and the calls in their order."""
Parser = TypeVar("Parser", bound="type[ToolParser]")


class UnknownToolParserError(WrongInput):
    """No parser has this name."""


class ToolParser:
    """Finds the calls in the tokens of one turn. A call that is broken is returned with its error, never raised.

    A subclass has ``parse``, or ``extract_tool_calls``, which need not take ``tools``.
    """

    _registry: ClassVar[dict[str, "type[ToolParser]"]] = {}

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if cls.parse is ToolParser.parse and cls.extract_tool_calls is ToolParser.extract_tool_calls:
            raise TypeError(f"{cls.__qualname__} finds no calls: give it the method parse or extract_tool_calls")
        own: Any = cls.__dict__.get("extract_tool_calls")
        if own is not None and len(inspect.signature(own).parameters) == 2:  # self and responses_ids

            @functools.wraps(own)
            async def extract(self: "ToolParser", responses_ids: Sequence[int], tools: Schemas = ()) -> Found:
                found: Found = await own(self, responses_ids)
                return found

            cls.extract_tool_calls = extract  # type: ignore[method-assign]

    def __init__(self, tokenizer: "PreTrainedTokenizerBase") -> None:
        self.tokenizer = tokenizer

    async def extract_tool_calls(self, responses_ids: Sequence[int], tools: Schemas = ()) -> Found:
        """Return the text of a turn without its calls, and the calls.

        Args: ``tools`` tells formats that write arguments without types which type they have.
        """
        text, calls = self.parse(self.text_of(responses_ids), tools)
        return text, [_encodable(call) for call in calls]

    def text_of(self, responses_ids: Sequence[int]) -> str:
        """Return the text of a turn with its special tokens, except those that end it."""
        tokens, special = list(responses_ids), set(self.tokenizer.all_special_ids)
        while tokens and tokens[-1] in special:
            tokens.pop()
        return str(self.tokenizer.decode(tokens, skip_special_tokens=False))

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; here none."""
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

    Raises: UnknownToolParserError naming the choices.
    """
    known = ToolParser.names()
    if name not in known:
        raise UnknownToolParserError(
            f"actor_rollout_ref.rollout.multi_turn.format={name}: is no parser of tool calls: write one of "
            f"{', '.join(known)} (the nearest: {', '.join(nearest(name, known)) or 'none'})"
        )
    return ToolParser._registry[name](tokenizer)


@ToolParser.register("hermes")
class HermesToolParser(ToolParser):
    """Reads ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``, several of which may follow each other."""

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; what the model thinks holds none."""
        kept, bodies = _between(text, "<tool_call>", "</tool_call>")
        return kept, [_call_of_json(body, "arguments") for body in bodies]


@ToolParser.register("qwen3-coder")
class Qwen3CoderToolParser(ToolParser):
    """Reads ``<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>``."""

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; a value has the type that its tool gives it."""
        kept, bodies = _between(text, "<tool_call>", "</tool_call>")
        return kept, [self._call(body, tools) for body in bodies]

    def _call(self, body: str, tools: Schemas) -> FunctionCall:
        function = next(_tagged(body, "function"), None)
        if function is None:
            return FunctionCall("", body.strip(), "the call has no <function=NAME> ... </function>")
        name, inner, is_closed = function
        types = _types(name, tools)
        arguments: dict[str, Any] = {}
        for key, value, is_whole in _tagged(inner, "parameter"):
            if is_whole:
                arguments[key] = _typed(value.removeprefix("\n").removesuffix("\n"), types.get(key))
        written = json.dumps(arguments, ensure_ascii=False)
        if inner.count("<parameter=") != len(arguments) or not is_closed:
            return FunctionCall(name, written, "the call has no complete <parameter=KEY> ... </parameter></function>")
        return FunctionCall(name, written)


@ToolParser.register("llama3-json")
class Llama3JsonToolParser(ToolParser):
    """Reads ``{"name": ..., "parameters": {...}}`` as the whole response; several stand between semicolons."""

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; other JSON, as an answer may be, stays text."""
        before, tag, rest = text.partition("<|python_tag|>")
        kept = before if tag else ""
        rest = (rest if tag else text).strip()
        if not (tag or re.match(r'\{\s*"(name|type|parameters)"', rest)):
            return text, []
        calls: list[FunctionCall] = []
        while rest:
            try:
                value, end = json.JSONDecoder().raw_decode(rest)
            except (ValueError, RecursionError):
                return kept, [*calls, FunctionCall(_name_in(rest), rest, _NO_JSON)]
            if not (tag or calls or (isinstance(value, dict) and "name" in value)):
                return text, []
            calls.append(_call_of_value(value, rest[:end], "parameters"))
            rest = rest[end:].lstrip(" \n;")
        return kept, calls


@ToolParser.register("pythonic")
class PythonicToolParser(ToolParser):
    """Reads ``[name(key=value, ...), ...]`` as the whole response, with values as Python or JSON writes them."""

    _CONSTANTS: ClassVar[dict[str, Any]] = {"true": True, "false": False, "null": None}

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return a text without its calls, and the calls; another list stays text."""
        body = text.strip().removeprefix("<|python_start|>").removesuffix("<|python_end|>").strip()
        first = re.match(r"\[\s*([A-Za-z_][\w.]*)\s*\(", body)
        if first is None:
            return text, []
        broken = FunctionCall(first[1], body, "the calls are no list such as [name(key=value)]")
        try:
            tree = ast.parse(body, mode="eval").body
            if not isinstance(tree, ast.List):
                return "", [broken]
            return "", [self._call(node) for node in tree.elts]
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return "", [broken]

    def _call(self, node: ast.expr) -> FunctionCall:
        if not isinstance(node, ast.Call):
            return FunctionCall("", ast.unparse(node), "is no call such as name(key=value)")
        name = ast.unparse(node.func)
        if node.args or any(keyword.arg is None for keyword in node.keywords):
            return FunctionCall(name, ast.unparse(node), "each argument needs its name: name(key=value)")
        try:
            arguments = {str(keyword.arg): self._value(keyword.value) for keyword in node.keywords}
            return FunctionCall(name, json.dumps(arguments, ensure_ascii=False))
        except (ValueError, TypeError, RecursionError, MemoryError):
            return FunctionCall(name, ast.unparse(node), "an argument is no constant, list or dictionary")

    def _value(self, node: ast.expr) -> Any:
        for inner in ast.walk(node):
            for field, child in ast.iter_fields(inner):
                if isinstance(child, list):
                    setattr(inner, field, [self._constant(each) for each in child])
                elif isinstance(child, ast.expr):
                    setattr(inner, field, self._constant(child))
        return ast.literal_eval(self._constant(node))

    def _constant(self, node: Any) -> Any:
        if isinstance(node, ast.Name) and node.id in self._CONSTANTS:
            return ast.copy_location(ast.Constant(self._CONSTANTS[node.id]), node)
        return node


@ToolParser.register("gpt-oss")
class GptOssToolParser(ToolParser):
    """Reads messages of harmony: a call is one to ``functions.NAME``, its body the arguments.

    Source: OpenAI harmony response format. A turn may hold several messages, each
    ``<|start|>HEADER<|message|>BODY<|end|>``; the first has no ``<|start|>``, which belongs to the prompt.
    """

    def parse(self, text: str, tools: Schemas = ()) -> Found:
        """Return what the messages to the user say, and the calls; the channel ``analysis`` holds neither."""
        if "<|message|>" not in text:
            return text, []
        said: list[str] = []
        calls: list[FunctionCall] = []
        for message in text.split("<|start|>"):
            header, marker, rest = message.partition("<|message|>")
            if not marker:
                continue
            body = re.split(r"<\|(?:end|call|return)\|>", rest, maxsplit=1)[0]
            recipient = re.search(r"\bto=(\S+?)(?=[\s<]|$)", header)
            if recipient is not None:
                calls.append(_call_with(recipient[1].removeprefix("functions."), body.strip()))
            elif not re.search(r"<\|channel\|>\s*analysis", header):
                said.append(body)
        return "\n".join(said), calls


def _between(text: str, start: str, end: str) -> tuple[str, list[str]]:
    """Return a text without what stands between marks outside of its thinking, and what stands there.

    The last end may be missing, as where generation stops at it.
    """
    hidden = list(_thinking(text))
    starts = [span[0] for span in hidden]
    kept, bodies, position = "", [], 0
    while (first := text.find(start, position)) != -1:
        before = bisect_right(starts, first)  # how many thoughts begin before it; the last of them may hold it
        if before and first < hidden[before - 1][1]:
            kept += text[position : hidden[before - 1][1]]
            position = hidden[before - 1][1]
            continue
        kept += text[position:first]
        last = text.find(end, first)
        bodies.append(text[first + len(start) : last if last != -1 else len(text)])
        position = last + len(end) if last != -1 else len(text)
    return kept + text[position:], bodies


def _tagged(text: str, tag: str) -> Iterator[tuple[str, str, bool]]:
    """Yield name and body of each ``<tag=NAME>BODY</tag>``, and whether it is closed; the last need not be.

    It reads a text once: a regular expression would look for the end of each of thousands of openings that a model
    repeats.
    """
    opening, closing, position = f"<{tag}=", f"</{tag}>", 0
    while (start := text.find(opening, position)) != -1:
        end_of_name = text.find(">", start)
        if end_of_name == -1:
            return
        position = start + len(opening)
        if end_of_name == position or text.find("\n", position, end_of_name) != -1:
            continue
        name = text[position:end_of_name]
        end = text.find(closing, end_of_name)
        yield name.strip(), text[end_of_name + 1 : end if end != -1 else len(text)], end != -1
        if end == -1:
            return
        position = end + len(closing)


def _thinking(text: str) -> Iterator[tuple[int, int]]:
    """Yield where thoughts begin and end; the prompt may have opened the first, and the last may be unfinished."""
    position = 0
    first_end = text.find("</think>")
    if first_end != -1 and text.find("<think>", 0, first_end) == -1:
        position = first_end + len("</think>")
        yield 0, position
    while (start := text.find("<think>", position)) != -1:
        end = text.find("</think>", start)
        position = len(text) if end == -1 else end + len("</think>")
        yield start, position


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


def _call_of_json(body: str, arguments_key: str) -> FunctionCall:
    body = body.strip()
    try:
        value = json.loads(body)
    except (ValueError, RecursionError):
        return FunctionCall(_name_in(body), body, _NO_JSON)
    return _call_of_value(value, body, arguments_key)


def _call_of_value(value: Any, body: str, arguments_key: str) -> FunctionCall:
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


def _types(name: str, tools: Schemas) -> dict[str, Any]:
    """Return the types of the parameters of a tool; clients of the endpoint may send schemas that are none."""
    for tool in tools:
        function = tool.get("function", {})
        if function.get("name") == name:
            parameters = function.get("parameters")
            properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
            items = properties.items() if isinstance(properties, Mapping) else ()
            return {key: each.get("type") for key, each in items if isinstance(each, Mapping)}
    return {}


def _typed(text: str, wanted: Any) -> Any:
    """Return a value of a type of a JSON schema; text where it has none, or where the text is no such value."""
    kinds = wanted if isinstance(wanted, list) else [wanted]
    if wanted is None or "string" in kinds:
        return text
    try:
        return json.loads(text if "boolean" not in kinds else text.strip().lower())
    except (ValueError, RecursionError):
        return text
