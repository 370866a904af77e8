"""Find the end of an assistant's turn in the text that a chat template writes."""

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

_SHOWN_CHARS = 40


@dataclass(frozen=True)
class Boundary:
    """The text that a template writes after an assistant's content.

    Attributes:
        end: the token that ends the turn; in formats whose turns have no end, the token that starts the next turn.
        after: the text that follows: the separator, the added messages and the generation prompt.
        last: the text from the same place on, where no message follows.
    """

    end: str
    after: str
    last: str


class SpecialTokens:
    """The special tokens of a tokenizer, found in text."""

    def __init__(self, tokens: Iterable[str], eos_token: str | None) -> None:
        self.eos_token = eos_token
        longest_first = sorted({token for token in tokens if token}, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def spans(self, text: str) -> list[tuple[int, int]]:
        """Return the start and end of each special token in a text."""
        return [match.span() for match in self._pattern.finditer(text)]

    def start_length(self, text: str) -> int:
        """Return the length of the special token that a text starts with; 0 if it starts with none."""
        match = self._pattern.match(text)
        return match.end() if match else 0

    def is_last_of(self, text: str) -> bool:
        """Return whether a text ends with a special token, apart from blanks."""
        return any(stop == len(text.rstrip()) for _, stop in self.spans(text)[-1:])

    def boundary(self, last: str, followed: str) -> Boundary | None:
        """Return the boundary at the end of a turn; None if no special token marks it.

        Args:
            last: the text after the content of the turn, where the turn is the last one.
            followed: the text after the same content, where the added messages and a generation prompt follow.
        """
        shared = len(os.path.commonprefix([last, followed]))
        spans = self.spans(followed)
        inside = [span for span in spans if span[1] <= shared]
        # A template that always writes a generation prompt has more special tokens in the shared part than the end.
        ends = [span for span in inside if followed[slice(*span)] == self.eos_token][:1] or inside[-1:]
        if not ends and spans and not followed[shared : spans[0][0]].strip():
            # The last turn ends with another token than earlier ones, or turns end where the next one starts.
            ends = spans[:1]
        if not ends:
            return None
        start, stop = ends[0]
        return Boundary(followed[start:stop], followed[stop:], last[start:])


def first_difference(one: str, other: str) -> tuple[str, str]:
    """Return both texts around their first difference."""
    at = len(os.path.commonprefix([one, other]))
    shown = slice(max(0, at - _SHOWN_CHARS), at + _SHOWN_CHARS)
    return one[shown], other[shown]
