"""Parsing of OpenAI API requests: the bodies that the endpoint accepts, and an error for each that it rejects."""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from verl.base_config import one_line
from verl.utils.json_types import Json, JsonObject

ROLES = ("system", "developer", "user", "assistant", "tool")
MOST_MESSAGES = 10_000
MOST_TOOLS = 1_024
_MOST_PARTS = 10_000
"""The most parts of a message, and the most tool calls in it."""
MOST_STOPS = 16
_MOST_STOP_LENGTH = 1000
"""The most characters of a stop text."""

_MOST_COMMAS = 2_000_000
"""The most commas of a body: more values than a trajectory has tokens. Commas are counted before a body is parsed,
since all threads wait for the parser.
"""

_SAMPLING: dict[str, tuple[float, float]] = {
    "temperature": (0.0, 100.0),
    "top_p": (0.0, 1.0),
    "min_p": (0.0, 1.0),
    "presence_penalty": (-2.0, 2.0),
    "frequency_penalty": (-2.0, 2.0),
    "repetition_penalty": (0.0, 10.0),
    "top_k": (-1, 2**31),
    "seed": (-(2**63), 2**63 - 1),
}
"""What a request may say about sampling, with the least and the most value."""

_WHOLE = ("top_k", "seed")

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "top_logprobs": (0,),
    "prompt_logprobs": (False,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "stop_token_ids": ([],),
    "ignore_eos": (False,),
    "min_tokens": (0,),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
"""Options that would change the answer and are not served, with the values that ask for nothing."""


class RequestError(Exception):
    """A request is refused; the error has the HTTP status, the wrong field, and its valid values."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code

    @property
    def kind(self) -> str:
        """The ``type`` of the error, as the OpenAI API names it."""
        if self.status == 401:
            return "authentication_error"
        return "invalid_request_error" if self.status < 500 else "server_error"


@dataclass(frozen=True)
class Options:
    """The options of a request: everything but its prompt.

    Attributes: ``sampling`` holds the values that the request names, by name; ``wants_log_probs`` and
        ``wants_token_ids`` say whether the answer has them.
    """

    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: Mapping[str, float] = field(default_factory=dict)
    wants_log_probs: bool = False
    wants_token_ids: bool = False
    stream: bool = False
    stream_usage: bool = False


Message = dict[str, Any]
"""A message as chat templates take it: ``content`` is a text; the arguments of ``tool_calls`` are objects."""


@dataclass(frozen=True)
class ChatRequest:
    """The body of ``/v1/chat/completions``; ``tools`` are those that the model may call."""

    messages: list[Message]
    tools: list[JsonObject]
    options: Options


@dataclass(frozen=True)
class CompletionRequest:
    """The body of ``/v1/completions``."""

    prompt: str | list[int]
    options: Options


def parse_body(body: bytes) -> JsonObject:
    """Return the object of a body.

    Raises: RequestError for a body that is no JSON object, or has too many values.
    """
    if body.count(b",") > _MOST_COMMAS:
        raise RequestError(f"the body has more than {_MOST_COMMAS} values")
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body cannot be read as JSON: {one_line(str(error))}") from error
    if not isinstance(value, dict):
        raise RequestError(f"the body must be a JSON object, not {_kind(value)}")
    return value


def parse_chat(
    body: Mapping[str, Json],
    most_messages: int = MOST_MESSAGES,
    most_tools: int = MOST_TOOLS,
    most_stops: int = MOST_STOPS,
) -> ChatRequest:
    """Parse a chat request, under limits on the numbers of messages, tools and stop texts.

    Raises: RequestError naming the field.
    """
    given = body.get("messages")
    if not isinstance(given, list) or not given:
        raise _wrong("messages", given, "must be a list of messages, with at least one")
    _check_count("messages", given, most_messages)
    messages = [_message(each, f"messages[{number}]") for number, each in enumerate(given)]
    tools = _objects(body.get("tools"), "tools", most_tools)
    for number, tool in enumerate(tools):
        function = tool.get("function")
        if tool.get("type") != "function" or not isinstance(function, dict) or not _is_name(function.get("name")):
            raise _wrong(f"tools[{number}]", tool, 'must be {"type": "function", "function": {"name": ..., ...}}')
    choice = body.get("tool_choice")
    if choice not in (None, "auto", "none") or (choice == "auto" and not tools):
        raise _wrong("tool_choice", choice, "must be auto (with tools) or none: the model chooses its calls itself")
    _check_text(json.dumps(tools, ensure_ascii=False), "tools")
    log_probs = _flag(body, "logprobs")
    return ChatRequest(messages, [] if choice == "none" else tools, _options(body, log_probs, most_stops))


def parse_completion(body: Mapping[str, Json], most_stops: int = MOST_STOPS) -> CompletionRequest:
    """Parse a completion request, under a limit on the number of stop texts.

    Raises: RequestError naming the field.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # a batch of one
    if isinstance(prompt, str):
        _check_text(prompt, "prompt")
    elif not isinstance(prompt, list) or not all(_is_integer(token) for token in prompt):
        raise _wrong("prompt", prompt, "must be one text or one list of token ids: send a request for each prompt")
    if not prompt:
        raise _wrong("prompt", prompt, "must not be empty")
    number = body.get("logprobs")
    if number not in (None, False, True) and not (_is_integer(number) and 0 <= number <= 1):
        raise _wrong("logprobs", number, "must be 0 or 1: log-probabilities are those of the sampled tokens")
    wanted = number is not None and number is not False
    return CompletionRequest(prompt, _options(body, wanted, most_stops))


def _options(body: Mapping[str, Json], wants_log_probs: bool, most_stops: int) -> Options:
    for name, allowed in _NEUTRAL.items():
        value = body.get(name)
        if value is not None and value not in allowed:
            expected = f"leave it out, or write {json.dumps(allowed[0])}" if allowed else "leave it out"
            raise _wrong(name, value, f"is not supported: {expected}")
    limits: list[int] = []
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is None:
            continue
        if not _is_integer(value) or value < 1:
            raise _wrong(name, value, "must be an integer of at least 1")
        limits.append(value)
    streaming = body.get("stream_options") or {}
    if not isinstance(streaming, dict):
        raise _wrong("stream_options", streaming, "must be an object")
    return Options(
        max_tokens=min(limits, default=None),
        stop=_stops(body.get("stop"), most_stops),
        sampling=dict(_sampling(body)),
        wants_log_probs=wants_log_probs,
        wants_token_ids=_flag(body, "return_token_ids"),
        stream=_flag(body, "stream"),
        stream_usage=_flag(streaming, "include_usage"),
    )


def _sampling(body: Mapping[str, Json]) -> Iterable[tuple[str, float]]:
    for name, (least, most) in _SAMPLING.items():
        value = body.get(name)
        if value is None:
            continue
        whole = name in _WHOLE
        if not _is_number(value) or (whole and not _is_integer(value)) or not least <= value <= most:
            kind = "an integer" if whole else "a number"
            raise _wrong(name, value, f"must be {kind} from {least:g} to {most:g}")
        yield name, value


def _stops(value: Json, most: int) -> tuple[str, ...]:
    texts = [value] if isinstance(value, str) else [] if value is None else value
    if isinstance(texts, list):
        _check_count("stop", texts, most)
    if not isinstance(texts, list) or not all(isinstance(text, str) and text for text in texts):
        raise _wrong("stop", value, "must be a text or a list of texts that are not empty")
    if any(len(text) > _MOST_STOP_LENGTH for text in texts):
        raise _wrong("stop", value, f"must be texts of at most {_MOST_STOP_LENGTH} characters")
    for text in texts:
        _check_text(text, "stop")
    return tuple(texts)


def _message(value: Json, where: str) -> Message:
    if not isinstance(value, dict):
        raise _wrong(where, value, "must be an object with role and content")
    role = value.get("role")
    if role not in ROLES:
        raise _wrong(f"{where}.role", role, f"must be one of {', '.join(ROLES)}")
    message: Message = {"role": role, "content": _content(value.get("content"), f"{where}.content")}
    calls = _objects(value.get("tool_calls"), f"{where}.tool_calls")
    if calls and role != "assistant":
        raise _wrong(f"{where}.tool_calls", calls, "belong to messages of the assistant")
    if calls:
        message["tool_calls"] = [_call(each, f"{where}.tool_calls[{number}]") for number, each in enumerate(calls)]
    if value.get("content") is None and role != "assistant":
        raise _wrong(f"{where}.content", None, "must be a text")
    for name in ("name", "tool_call_id"):
        text = value.get(name)
        if text is not None:
            if not isinstance(text, str):
                raise _wrong(f"{where}.{name}", text, "must be a text")
            _check_text(text, f"{where}.{name}")
            message[name] = text
    return message


def _content(value: Json, where: str) -> str:
    """Return the text of a message; a list of parts becomes one text."""
    if value is None:
        return ""
    if isinstance(value, list):
        parts = _objects(value, where)
        for number, part in enumerate(parts):
            kind = part.get("type")
            if kind != "text":
                raise _wrong(f"{where}[{number}].type", kind, "must be text: the endpoint takes no images or sounds")
            if not isinstance(part.get("text"), str):
                raise _wrong(f"{where}[{number}].text", part.get("text"), "must be a text")
        value = "".join(str(part["text"]) for part in parts)
    if not isinstance(value, str):
        raise _wrong(where, value, "must be a text, or a list of parts of type text")
    _check_text(value, where)
    return value


def _call(value: JsonObject, where: str) -> JsonObject:
    function = value.get("function")
    if not isinstance(function, dict) or not _is_name(function.get("name")):
        raise _wrong(where, value, 'must be {"type": "function", "function": {"name": ..., "arguments": ...}}')
    arguments = function.get("arguments", "{}")
    if isinstance(arguments, str):
        arguments = parse_arguments(arguments)
    elif not isinstance(arguments, dict):
        raise _wrong(f"{where}.function.arguments", arguments, "must be a text that holds a JSON object")
    _check_text(json.dumps([arguments, function["name"]], ensure_ascii=False), where)
    call: JsonObject = {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
    name = value.get("id")
    if name is not None and not isinstance(name, str):
        raise _wrong(f"{where}.id", name, "must be a text")
    return call if name is None else {"id": name, **call}


def parse_arguments(text: str) -> Json:
    """Return the arguments of a call for chat templates: the value of the JSON text, or the text if it is not JSON.

    A model writes what it likes, and clients send it back as it was.
    """
    try:
        return json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return text


def _check_count(where: str, values: Sequence[Json], most: int) -> None:
    """Refuse a list before its parts are looked at, if there are too many."""
    if len(values) > most:
        raise RequestError(f"{where} has {len(values)} entries: it must have at most {most}", where)


def _objects(value: Json, where: str, most: int = _MOST_PARTS) -> list[JsonObject]:
    if value is None:
        return []
    if isinstance(value, list):
        _check_count(where, value, most)
    if not isinstance(value, list) or not all(isinstance(each, dict) for each in value):
        raise _wrong(where, value, "must be a list of objects")
    return value


def _flag(body: Mapping[str, Json], name: str) -> bool:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise _wrong(name, value, "must be true or false")
    return bool(value)


def _check_text(text: str, where: str) -> None:
    """Refuse half a surrogate pair, which JSON can hold and no tokenizer can encode."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise RequestError(f"{where}: holds half a surrogate pair at character {error.start}", where) from error


def _is_name(value: Json) -> bool:
    return isinstance(value, str) and bool(value)


def _is_integer(value: Json) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: Json) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _no_constant(name: str) -> Json:
    raise ValueError(f"{name} is no JSON value")


def _kind(value: Json) -> str:
    names: Sequence[tuple[type, str]] = (
        (bool, "true or false"),
        (str, "a text"),
        (list, "a list"),
        (int, "a number"),
        (float, "a number"),
    )
    return next((name for kind, name in names if isinstance(value, kind)), "null")


def _wrong(where: str, value: Json, expected: str) -> RequestError:
    shown = one_line(json.dumps(value, default=str), 100)
    return RequestError(f"{where}={shown}: {expected}", where)
