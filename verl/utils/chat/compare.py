"""Compare the tokens of a finished trajectory with the tokens of its conversation rendered as a whole."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from enum import StrEnum

from verl.errors import ChatFormatError
from verl.utils.chat.chat_format import ChatFormat
from verl.utils.chat.messages import Message, plain

_MOST_COMPARED = 4096
_MOST_PAIRS = 50_000
"""Tokens, and pairs of equal ones, whose differences are told apart. A longer or more monotonous stretch is one
difference: the time grows with the third power, and 2,000 times the same two tokens take 40 s."""


class SanityCheckMode(StrEnum):
    """Values of ``multi_turn.tokenization_sanity_check_mode``."""

    DISABLE = "disable"
    STRICT = "strict"
    IGNORE_STRIPPABLE = "ignore_strippable"


@dataclass(frozen=True)
class Difference:
    """Tokens of a trajectory that a rendering of the whole conversation lacks, or has in another form.

    Attributes:
        start: position in the trajectory.
        token_ids: the tokens of the trajectory from there on.
        whole_ids: the tokens that the whole rendering has in their place.
        text, whole_text: both as text.
    """

    start: int
    token_ids: tuple[int, ...]
    whole_ids: tuple[int, ...]
    text: str
    whole_text: str

    def __str__(self) -> str:
        return f"at token {self.start}: {self.text!r} in the trajectory, {self.whole_text!r} in the whole conversation"


def whole_differences(
    chat: ChatFormat, messages: Sequence[Message], token_ids: Sequence[int], mode: SanityCheckMode | str
) -> list[Difference]:
    """Compare a finished trajectory with its conversation rendered as a whole; an empty list means that they agree.

    Texts that the model sampled in other tokens than the tokenizer would take are differences in ``strict`` mode.
    ``ignore_strippable`` compares texts, and blanks do not count. The last turn may end with another token than earlier
    ones, as with ``<|return|>`` of gpt-oss.

    Args:
        messages: the conversation, with the last sampled turn.
        token_ids: prompt and response, (T,), with one token per image.
    """
    mode = SanityCheckMode(mode)
    if mode is SanityCheckMode.DISABLE:
        return []
    history = plain(messages)
    ends: tuple[str, str] | None = None
    try:
        if history[-1]["role"] == "assistant":
            boundary = chat.boundary(history, [{"role": "user", "content": "a"}])
            last_end = boundary.last[: chat.special.start_length(boundary.last)] or boundary.end
            ends = last_end, boundary.end
            whole = chat.render(history).removesuffix(boundary.last) + (last_end if chat.is_ended(token_ids) else "")
        else:
            whole = chat.render(history, True)
    except ChatFormatError as error:
        return [Difference(0, (), (), "", str(error))]
    found = _differences(chat, list(token_ids), chat.encode(whole))
    if ends is not None:
        found = [one for one in found if (one.text, one.whole_text) != ends]
    if mode is SanityCheckMode.IGNORE_STRIPPABLE:
        found = [one for one in found if "".join(one.text.split()) != "".join(one.whole_text.split())]
    return found


def _differences(chat: ChatFormat, ids: list[int], whole: list[int]) -> list[Difference]:
    start = 0
    while start < min(len(ids), len(whole)) and ids[start] == whole[start]:
        start += 1
    stop = 0
    while stop < min(len(ids), len(whole)) - start and ids[len(ids) - 1 - stop] == whole[len(whole) - 1 - stop]:
        stop += 1
    one = ids[start : len(ids) - stop]
    other = whole[start : len(whole) - stop]
    if not one and not other:
        return []
    spans = [(0, len(one), 0, len(other))]
    counts = Counter(other)
    if max(len(one), len(other)) <= _MOST_COMPARED and sum(counts[token] for token in one) <= _MOST_PAIRS:
        codes = SequenceMatcher(None, one, other, autojunk=False).get_opcodes()
        spans = [tuple(code[1:]) for code in codes if code[0] != "equal"]  # type: ignore[misc]
    return [
        Difference(
            start + a,
            tuple(one[a:b]),
            tuple(other[c:d]),
            chat.decode(one[a:b]),
            chat.decode(other[c:d]),
        )
        for a, b, c, d in spans
    ]
