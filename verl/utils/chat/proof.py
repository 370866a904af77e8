"""Conversations that show whether a chat template can be written in pieces."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

from verl.errors import ChatFormatError
from verl.utils.chat.boundary import Boundary, first_difference
from verl.utils.chat.messages import Message, Turn
from verl.utils.chat.others import ControlTexts

_SYSTEM = {"role": "system", "content": "Answer shortly."}
_TALKS = (
    ("How are you?", "Fine."),
    ("Zähle: 1, 2", "3, 4 — 五 🙂", "And then?", "5"),
    ("a", "", "", "b", "c", "d"),
)


class Writes(Protocol):
    """The properties proven of a ``ChatFormat``."""

    tools: list[Turn]

    def render(self, messages: Sequence[Message], generation_prompt: bool = False) -> str:
        """Return the text of messages."""

    def boundary(self, messages: Sequence[Message], added: Sequence[Message]) -> Boundary:
        """Return the text after the content of the last of ``messages``."""

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text."""

    @property
    def control(self) -> ControlTexts:
        """The texts of control tokens."""


def prove_pieces(chat: Writes) -> None:
    """Compare pieces with the whole rendering of test conversations: empty texts, unicode, and tool calls if any.

    Raises: ChatFormatError with the template's fault.
    """
    start = [_SYSTEM] if _takes(chat, [_SYSTEM, {"role": "user", "content": "a"}]) else []
    for talk in _TALKS:
        turns = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(talk)]
        _prove(chat, [*start, *turns, {"role": "user", "content": "Thanks."}])
    _prove_others(chat)
    if chat.tools:
        for results in (["4"], ["", '{"a": "ß"}']):
            _prove(chat, [*start, *_with_tools(chat.tools, results)])


def _prove_others(chat: Writes) -> None:
    """Compare a question made of control texts with a plain one: both must have only the template's control tokens."""
    texts = (chat.control.cut("".join(chat.control.texts)), "a")
    written = [chat.encode(chat.render([{"role": "user", "content": text}], True)) for text in texts]
    found, usual = map(chat.control.count, written)
    if found != usual:
        raise ChatFormatError(
            f"{found - usual} texts of control tokens in an answer of a tool would become such tokens"
        )


def _with_tools(tools: Sequence[Message], results: Sequence[str]) -> list[Turn]:
    name = str(tools[0].get("function", tools[0]).get("name"))
    calls = [
        {"id": f"call{at:05d}", "type": "function", "function": {"name": name, "arguments": {"a": at}}}
        for at in range(len(results))
    ]
    replies = [
        {"role": "tool", "name": name, "tool_call_id": call["id"], "content": result}
        for call, result in zip(calls, results, strict=True)
    ]
    return [
        {"role": "user", "content": "How many?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        *replies,
        {"role": "assistant", "content": "There are 4."},
        {"role": "user", "content": "Thanks."},
    ]


def _takes(chat: Writes, messages: Sequence[Message]) -> bool:
    try:
        chat.render(messages, True)
    except ChatFormatError:
        return False
    return True


def _prove(chat: Writes, messages: Sequence[Message]) -> None:
    """Compare at each assistant turn of a conversation."""
    said = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
    for at, following in pairwise([*said, len(messages)]):
        history = messages[: at + 1]
        added = messages[at + 1 : following]
        if len(history[-1].get("tool_calls", ())) > 1 and not _takes(chat, [*history, *added]):
            return  # templates of models that make one call at a time say so by an error
        _prove_turn(chat, history, added)


def _prove_turn(chat: Writes, history: Sequence[Message], added: Sequence[Message]) -> None:
    try:
        boundary = chat.boundary(history, added)
        shown = chat.render(history[:-1], True)
        whole = chat.render([*history, *added], True)
    except ChatFormatError as error:
        roles = [message["role"] for message in [*history, *added]]
        raise ChatFormatError(f"{error} (roles {roles})") from error
    tail = boundary.end + boundary.after
    before = whole.removesuffix(tail)
    if not whole.endswith(tail):
        turn = chat.render(history).removesuffix(boundary.last)
        _equal(whole, turn + tail, "the text after a turn depends on what was said in it")
    content = history[-1]["content"].strip()
    if not history[-1].get("tool_calls") and not before.rstrip().endswith(content):
        _equal(before[-len(content) :], content, "it writes more after what was said than the end of the turn")
    ids = chat.encode(whole)
    pieces = [*chat.encode(before), *chat.encode(tail)]
    if ids != pieces:
        raise ChatFormatError(
            f"the tokens at the end of a turn depend on the text before it, near {tail[:40]!r}: "
            f"{_around(ids, pieces)} as a whole and in pieces"
        )
    prompt = chat.encode(shown)
    if content and whole.startswith(shown) and ids[: len(prompt)] != prompt:
        raise ChatFormatError(
            f"the chat template ends its generation prompt with {shown[-20:]!r}, whose tokens change with the text "
            f"after it: {_around(ids, prompt)} as a whole and in pieces"
        )


def _equal(whole: str, pieces: str, fault: str) -> None:
    if whole != pieces:
        one, other = first_difference(whole, pieces)
        raise ChatFormatError(
            f"the chat template cannot be written in pieces, because {fault}: {one!r} as a whole, {other!r} in pieces"
        )


def _around(one: Sequence[int], other: Sequence[int]) -> str:
    at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    shown = slice(max(0, at - 2), at + 3)
    return f"tokens {list(one[shown])} and {list(other[shown])}"
