"""Cut a recorded conversation into the pieces in which a rollout would have produced it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from verl.errors import ChatFormatError
from verl.utils.chat.boundary import Boundary
from verl.utils.chat.chat_format import ChatFormat
from verl.utils.chat.messages import Message, plain


@dataclass(frozen=True)
class Piece:
    """Part of the text of a conversation.

    Attributes:
        start, stop: its messages are those from ``start`` to ``stop``; a generation prompt has none.
        said: whether it is what the assistant says, to the end of its turn and the separator after it.
        before: the text from the last special token before it on, which its tokens may depend on.
        added_end: the end of the last turn where the template writes it only with the next turn; ``text`` has it too.
            None if no end was found.
    """

    text: str
    start: int
    stop: int
    said: bool
    before: str = ""
    added_end: str | None = ""


def pieces(
    chat: ChatFormat, messages: Sequence[Message], split: bool = False, num_prompt_messages: int = 0
) -> list[Piece]:
    """Return the pieces of a conversation: prompt, turn, the text between turns, turn, and so on.

    Each turn stands as the template writes it when it is the last one, with its thought for instance, and stays so.

    Args:
        split: give each message between two turns a piece, and the generation prompt; tool messages in a row are one.
        num_prompt_messages: so many messages at least are the prompt, whose turns are those of the template.

    Raises: ChatFormatError when the template rejects messages or hides where a turn starts.
    """
    conversation = plain(messages)
    turns = [at for at, each in enumerate(conversation) if each["role"] == "assistant" and at >= num_prompt_messages]
    first = chat.render(conversation[: turns[0]], True)
    found = _given(chat, conversation, 0, turns[0], first, split)
    for at, following in pairwise([*turns, len(conversation)]):
        history = conversation[: at + 1]
        added = conversation[at + 1 : following]
        alone = chat.render(history)
        start, surplus = _turn_start(chat, history, alone)
        if surplus:
            found[-1] = Piece(found[-1].text[:-surplus], found[-1].start, found[-1].stop, said=False)
        if at + 1 == len(conversation):
            end = _missing_end(chat, history, alone[start:])
            found.append(Piece(alone[start:] + (end or ""), at, at + 1, said=True, added_end=end))
            break
        boundary = chat.boundary(history, added, generation_prompt=following < len(conversation), needs_end=False)
        end = boundary.last[: chat.special.start_length(boundary.last)] or boundary.end
        separator = _separator(chat, boundary.last[len(end) :], boundary.after)
        turn = alone.removesuffix(boundary.last)[start:]
        found.append(Piece(turn + end + separator, at, at + 1, said=True))
        found += _given(chat, conversation, at + 1, following, boundary.after[len(separator) :], split)
    return _anchored(chat, found)


def written_turn(chat: ChatFormat, messages: Sequence[Message]) -> list[int]:
    """Return the tokens of the last message, an assistant's turn that nobody has sampled, with the end of the turn.

    Raises: ChatFormatError when the template rejects messages or hides where the turn starts or ends.
    """
    history = plain(messages)
    text = chat.render(history)
    start, _ = _turn_start(chat, history, text)
    boundary = _boundary(chat, history)
    end = boundary.last[: chat.special.start_length(boundary.last)] or boundary.end
    spans = chat.special.spans(text[:start])
    before = text[spans[-1][0] : start] if spans else text[:start]
    return chat.encode_after(before, text.removesuffix(boundary.last)[start:] + end)


def header_that_ends_turns(chat: ChatFormat) -> str | None:
    """Return the token that ends an answer in formats whose turns end with the next turn's header; None in others.

    It is the header of the user's turn, and the model samples it to end its own.
    """
    try:
        boundary = _boundary(chat, [{"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}])
    except ChatFormatError:
        return None
    return None if chat.special.start_length(boundary.last) else boundary.end


def _boundary(chat: ChatFormat, history: Sequence[Message]) -> Boundary:
    """Return the boundary after the last message, an assistant's turn, as the model would write it."""
    calls = history[-1].get("tool_calls", ())  # some templates end a turn of calls otherwise
    answers = [
        {"role": "tool", "name": call["function"]["name"], "tool_call_id": call.get("id"), "content": "a"}
        for call in calls
    ]
    return chat.boundary(history, answers or [{"role": "user", "content": "a"}])


def _missing_end(chat: ChatFormat, history: Sequence[Message], turn: str) -> str | None:
    """Return the end of the last turn if the template writes it only with the next one; None if it has no end."""
    eos = chat.special.eos_token
    if eos and turn.rstrip().endswith(eos):
        return ""
    try:
        boundary = _boundary(chat, history)
    except ChatFormatError:
        return "" if chat.special.is_last_of(turn) else None
    return "" if chat.special.start_length(boundary.last) else boundary.end


def _given(chat: ChatFormat, messages: Sequence[Message], start: int, stop: int, text: str, split: bool) -> list[Piece]:
    """Return the pieces of the messages between two turns; ``text`` is theirs with the next generation prompt."""
    if not split:
        return [Piece(text, start, stop, said=False)]
    cuts: list[tuple[int, int]] = [(start, 0)]
    whole = chat.render(messages[:stop], stop < len(messages))
    for at in range(start + 1, stop + 1):
        if at < stop and messages[at]["role"] == "tool" == messages[at - 1]["role"]:
            continue
        try:
            upto = chat.render(messages[:at])
        except ChatFormatError:  # a template that writes the system message inside the first question
            continue
        if not whole.startswith(upto) or len(text) < len(whole) - len(upto):
            raise ChatFormatError(f"the chat template hides where the text of message {at} starts and ends")
        cuts.append((at, len(text) - (len(whole) - len(upto))))
    bounds = [*cuts, (stop, len(text))]
    return [Piece(text[a:b], at, until, said=False) for (at, a), (until, b) in pairwise(bounds)]


def _turn_start(chat: ChatFormat, history: Sequence[Message], alone: str) -> tuple[int, int]:
    """Return the start of the last turn in the text ``alone``, which it ends, and the surplus of its prompt.

    The surplus is the part of the generation prompt that the template does not write before the turn, such as the
    opening of a thought.
    """
    shown = chat.render(history[:-1], True)
    if alone.startswith(shown):
        return len(shown), 0
    bare = chat.render(history[:-1])
    prompt = shown[len(bare) :] if shown.startswith(bare) else ""
    shared = len(os.path.commonprefix([shown, alone]))
    if shared >= len(shown) - len(prompt) and prompt:
        ends = [stop for _, stop in chat.special.spans(shown) if len(shown) - len(prompt) <= stop <= shared]
        kept = max(ends, default=len(shown) - len(prompt))
        return kept, len(shown) - kept
    marked = chat.marked_turn(history)
    at = marked.rfind(prompt) + len(prompt)
    if not prompt or at < len(prompt) or not alone.startswith(marked[:at]):
        raise ChatFormatError(f"the chat template hides where the text of message {len(history) - 1} starts")
    return at, 0


def _separator(chat: ChatFormat, last: str, after: str) -> str:
    """Return the text that a template writes after the end of every turn, whether or not another one follows."""
    shared = len(os.path.commonprefix([last, after]))
    cut = [start for start, stop in chat.special.spans(after) if start < shared < stop]
    return after[: cut[0] if cut else shared]


def _anchored(chat: ChatFormat, found: Sequence[Piece]) -> list[Piece]:
    result = []
    before = ""
    for piece in found:
        if piece.text:
            result.append(replace(piece, before=before))
        before += piece.text
        spans = chat.special.spans(before)
        before = before[spans[-1][0] :] if spans else before
    return result
