"""Messages of a conversation in the forms that chat templates take."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.utils.parsing import parse_json

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

Message = Mapping[str, Any]
"""A message of a conversation, with ``role``, ``content`` and further fields of its template; or a part of one."""
Turn = dict[str, Any]
"""A message that is made here."""
Video = tuple["Tensor | np.ndarray", dict[str, Any]]
"""The frames of a video, (T, 3, H, W) uint8, and their times as transformers' processors take them."""
TURNS_COLUMN = "__turns__"
"""Column of a batch that holds the turns of each row: of ``role`` at the tokens ``start`` to ``end`` of the response,
with the ``text`` and the ``calls`` that tools and users answered."""
THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Fields in which templates expect the reasoning of an assistant."""


def plain(messages: Sequence[Message]) -> list[Turn]:
    """Return messages without null fields and with the arguments of tool calls as objects, which templates expect."""
    return [_plain(message) for message in messages]


def _plain(message: Message) -> Turn:
    kept = {key: value for key, value in message.items() if value is not None or key == "content"}
    if not kept.get("tool_calls"):
        kept.pop("tool_calls", None)
        return kept
    kept["tool_calls"] = [_with_arguments(call) for call in kept["tool_calls"]]
    return kept


def _with_arguments(call: Message) -> Turn:
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            parsed = parse_json(function["arguments"])
        except ValueError:
            parsed = None
        if isinstance(parsed, dict):
            function["arguments"] = parsed
    return {**call, "type": "function", "function": function}


def with_text_arguments(messages: Sequence[Message]) -> list[Turn]:
    """Return messages with the arguments of tool calls as JSON text."""
    return [
        {**message, "tool_calls": [_with_text(call) for call in message["tool_calls"]]}
        if message.get("tool_calls")
        else dict(message)
        for message in messages
    ]


def _with_text(call: Message) -> Turn:
    function = dict(call["function"])
    if not isinstance(function.get("arguments"), str):
        function["arguments"] = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
    return {**call, "function": function}


def marked(message: Message, mark: str) -> Turn:
    """Return an assistant's message that ends with a mark: in the arguments of its last tool call, or its content."""
    turn: Turn = {"role": message["role"], "content": mark}
    if message.get("tool_calls"):
        *calls, last = message["tool_calls"]
        function = {**last["function"], "arguments": {"x": mark}}
        turn["tool_calls"] = [*calls, {**last, "function": function}]
        turn["content"] = ""
    return turn


def with_tool_calls(messages: Sequence[Message]) -> list[Turn]:
    """Return the messages with a tool call before each tool message, and with identifiers that every template takes.

    A loop may keep tool calls in the text that the model wrote; some templates want them as objects, and some reject
    text that looks like tool calls. The assistant's text does not matter, because it is before the boundary.
    """
    result: list[Turn] = []
    callers: list[Turn] = []  # calls of the last assistant turn that wait for a result
    number = 0
    for at, message in enumerate(messages):
        copied = dict(message)
        if copied["role"] == "assistant":
            given = list(copied.get("tool_calls") or [])
            replies = _tool_messages_after(messages, at)
            callers = [_call(number + i, given[i] if i < len(given) else {}, reply) for i, reply in enumerate(replies)]
            number += len(callers)
            copied = {"role": "assistant", "content": "said"}
            if callers:
                copied |= {"content": "", "tool_calls": list(callers)}
        elif copied["role"] == "tool" and callers:
            copied["tool_call_id"] = callers.pop(0)["id"]
        result.append(copied)
    return result


def _tool_messages_after(messages: Sequence[Message], at: int) -> list[Message]:
    replies = []
    for message in messages[at + 1 :]:
        if message["role"] != "tool":
            break
        replies.append(message)
    return replies


def _call(number: int, given: Message, reply: Message) -> Turn:
    function = given.get("function") or {}
    arguments = function.get("arguments")
    return {
        "id": f"call{number:05d}",  # nine letters and digits, which Mistral's templates want
        "type": "function",
        "function": {
            "name": function.get("name") or reply.get("name") or "tool",
            "arguments": arguments if isinstance(arguments, dict) else {},
        },
    }
