"""Find tool calls between tags in sampled text. A call ends where its own grammar ends it; thoughts hold no call."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

THINK = "<think>"
END_OF_THOUGHT = "</think>"
CALL = "<tool_call>"
END_OF_CALL = "</tool_call>"

Call = TypeVar("Call")
Read = Callable[[int], tuple[Call, int] | None]
"""Reads the call that begins at a place of the text, after its opening tag; returns the call and where it stops.

None says that the text from there on does not follow the grammar."""
_MARKS = re.compile(f"{THINK}|{END_OF_THOUGHT}|{CALL}")
_TAGS = re.compile(r"</?tool_call>|</(?:function|parameter)>|<(?:function|parameter)=[^<>\n]++>")


@dataclass
class Found(Generic[Call]):
    """The text without its calls, and the calls in their order."""

    kept: str
    calls: list[Call]


def find_calls(text: str, read: Read[Call], broken: Callable[[str], Call]) -> Found[Call]:
    """Return a text without the calls outside of its thoughts, and the calls.

    The prompt may have opened the first thought, and the last may be unfinished. Tags inside a call that follows the
    grammar are text.

    Args: ``broken`` makes a call of what does not follow the grammar: the text up to the next ``</tool_call>``.
    """
    kept: list[str] = []
    calls: list[Call] = []
    position = copied = 0
    thinks = has_thought = False
    while (mark := _MARKS.search(text, position)) is not None:
        position = mark.end()
        if mark[0] == THINK:
            thinks = has_thought = True
        elif mark[0] == END_OF_THOUGHT:
            if not has_thought:  # the prompt has opened the thought, so all text before the end tag is a thought
                kept = []
                calls = []
                copied = 0
            thinks = False
            has_thought = True
        elif (found := read(position)) is not None:
            call, position = found
            if not thinks:
                kept.append(text[copied : mark.start()])
                calls.append(call)
                copied = position
        elif not thinks:
            end = text.find(END_OF_CALL, position)
            stop = len(text) if end == -1 else end
            thought = -1 if has_thought else text.find(END_OF_THOUGHT, position, stop)
            if thought != -1:
                position = thought
                continue
            kept.append(text[copied : mark.start()])
            calls.append(broken(text[position:stop]))
            position = copied = min(len(text), stop + len(END_OF_CALL))
    return Found("".join([*kept, text[copied:]]), calls)


def split_thought(text: str, call: re.Pattern[str]) -> tuple[str, str]:
    """Return the thought at the head of a text, and the rest; the prompt may have opened the thought.

    Args: ``call`` finds where a call begins; a call before the end of a thought that nobody has opened is one.
    """
    is_opened = text.lstrip().startswith(THINK)
    end = text.find(END_OF_THOUGHT)
    if end == -1:
        return (text, "") if is_opened else ("", text)
    begin = call.search(text)
    if not is_opened and begin is not None and begin.start() < end:
        return "", text
    stop = end + len(END_OF_THOUGHT)
    return text[:stop], text[stop:]


@dataclass(frozen=True)
class _Tag:
    """A tag; ``value`` is the name that an opening tag gives, such as the function's."""

    name: str
    is_end: bool
    value: str
    start: int
    stop: int


@dataclass(frozen=True)
class ElementCall:
    """A call that is written as elements: its name, and the text of each argument."""

    name: str
    arguments: dict[str, str]


class Elements:
    """Reads ``<tool_call><function=NAME><parameter=KEY>TEXT</parameter></function></tool_call>`` in a text.

    Blanks may stand between tags. Nothing in ``TEXT`` is escaped, so an argument that contains tags is ambiguous. It
    ends at a ``</parameter>`` that the next tag of the call follows, chosen by the first rule that applies: the first
    one alone on its line, as chat templates write it, if no end tag is then left over; the one with which all tags
    inside are paired; the first one that leaves no end tag over before the next call; the first one.
    """

    def __init__(self, text: str) -> None:
        self.text = text
        self.tags = [_tag(match) for match in _TAGS.finditer(text)]
        self._openings = {tag.stop: place for place, tag in enumerate(self.tags) if _is(tag, "tool_call")}
        before = [0, *(tag.stop for tag in self.tags)]
        self._is_glued = [not text[stop : tag.start].strip() for stop, tag in zip(before, self.tags, strict=False)]
        self._partners = _partners(self.tags)
        self._look_ahead()

    def read(self, start: int) -> tuple[ElementCall, int] | None:
        """Read the call after the opening tag that stops at ``start``; None if it does not follow the grammar."""
        return self._read(start, self._end_on_own_line) or self._read(start, self._end_of_value)

    def _read(self, start: int, end_of: Callable[[int], int | None]) -> tuple[ElementCall, int] | None:
        place = self._openings[start] + 1
        if not self._is_next(place, "function"):
            return None
        name = self.tags[place].value
        arguments: dict[str, str] = {}
        while self._is_next(place + 1, "parameter"):
            opening = self.tags[place + 1]
            end = end_of(place + 1)
            if end is None or opening.value in arguments:
                return None
            written = self.text[opening.stop : self.tags[end].start]
            arguments[opening.value] = written.removeprefix("\n").removesuffix("\n")
            place = end
        stop = self._stop_of_call(place + 1)
        return None if stop is None else (ElementCall(name, arguments), stop)

    def _look_ahead(self) -> None:
        """Compute for each position the next tag of each kind; the position after the last tag means none."""
        none = len(self.tags)
        self._is_clean = [True] * (none + 1)  # no end tag is left over before the next call
        self._next_call = [none] * (none + 1)
        self._next_stop = [none] * (none + 1)  # the next stop of a call
        self._next_end = [none] * (none + 1)  # the next end of an argument
        self._next_clean_end = [none] * (none + 1)
        self._next_own_end = [none] * (none + 1)  # the next end of an argument on its own line
        for place in reversed(range(none)):
            tag = self.tags[place]
            after = place + 1
            self._is_clean[place] = _is(tag, "tool_call") or (not tag.is_end and self._is_clean[after])
            is_call = _is(tag, "tool_call") and self._is_next(after, "function")
            self._next_call[place] = place if is_call else self._next_call[after]
            is_stop = _is(tag, "function", is_end=True) and self._is_next(after, "tool_call", is_end=True)
            self._next_stop[place] = place if is_stop else self._next_stop[after]
            self._next_end[place] = place if self._ends_value(place) else self._next_end[after]
            self._next_clean_end[place] = place if self._ends_cleanly(place) else self._next_clean_end[after]
            is_own = self._is_on_own_line(place) and _is(tag, "parameter", is_end=True)
            self._next_own_end[place] = place if is_own else self._next_own_end[after]

    def _end_on_own_line(self, opening: int) -> int | None:
        end = self._next_own_end[opening + 1]
        if self._is_missing(opening + 1, end) or not self._is_on_own_line(opening):
            return None
        return end if self._ends_cleanly(end) else None

    def _is_on_own_line(self, place: int) -> bool:
        start = self.tags[place].start
        stop = self.tags[place].stop
        return self.text[start - 1 : start] in ("", "\n") and self.text[stop : stop + 1] in ("", "\n")

    def _end_of_value(self, opening: int) -> int | None:
        partner = self._partners[opening]
        after = opening + 1
        if partner is not None and self._ends_cleanly(partner):
            return partner
        clean = self._next_clean_end[after]
        call = self._next_call[after]
        end = clean if clean < call else self._next_end[after]
        return None if self._is_missing(after, end) else end

    def _is_missing(self, after: int, end: int) -> bool:
        """Whether an argument lacks its end tag: none follows, or the next end tag belongs to a later call."""
        return end == len(self.tags) or self._next_stop[after] < self._next_call[after] < end

    def _ends_value(self, place: int) -> bool:
        if not _is(self.tags[place], "parameter", is_end=True):
            return False
        return self._is_next(place + 1, "parameter") or self._stop_of_call(place + 1) is not None

    def _ends_cleanly(self, place: int) -> bool:
        if not self._ends_value(place):
            return False
        return self._is_next(place + 1, "parameter") or self._is_clean[min(place + 3, len(self.tags))]

    def _stop_of_call(self, place: int) -> int | None:
        """Return the end of a call whose arguments end before a position; the last call may lack ``</tool_call>``."""
        if not self._is_next(place, "function", is_end=True):
            return None
        if self._is_next(place + 1, "tool_call", is_end=True):
            return self.tags[place + 1].stop
        is_last = place + 1 == len(self.tags) and not self.text[self.tags[place].stop :].strip()
        return len(self.text) if is_last else None

    def _is_next(self, place: int, name: str, is_end: bool = False) -> bool:
        """Whether the tag at a position is of a kind and only blanks precede it."""
        return place < len(self.tags) and self._is_glued[place] and _is(self.tags[place], name, is_end)


def _tag(match: re.Match[str]) -> _Tag:
    name, _, value = match[0][1:-1].removeprefix("/").partition("=")
    return _Tag(name, match[0].startswith("</"), value.strip(), match.start(), match.end())


def _is(tag: _Tag, name: str, is_end: bool = False) -> bool:
    return tag.name == name and tag.is_end == is_end


def _partners(tags: Sequence[_Tag]) -> list[int | None]:
    """Match each opening tag with its end tag, so that all tags between both are matched too."""
    partners: list[int | None] = [None] * len(tags)
    for place in reversed(range(len(tags))):
        if tags[place].is_end:
            continue
        after = place + 1
        while after < len(tags) and (inner := partners[after]) is not None:
            after = inner + 1
        if after < len(tags) and _is(tags[after], tags[place].name, is_end=True):
            partners[place] = after
    return partners
