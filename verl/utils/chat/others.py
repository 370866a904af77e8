"""Texts of tools and users in a conversation: no part of them becomes a control token.

A tokenizer takes the text ``<|im_end|>`` for the token that ends a turn, whoever wrote it. So a mark, the cut, is put
behind the first character of each such text before the chat template is rendered, and the tokenizer gets the parts
between the cuts one by one. A special token of one character cannot be cut: ``?`` takes its place. A conversation
without such texts has no cut, and its tokens are those of the whole.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.utils.chat.messages import Message, Turn
from verl.utils.tokenizer import one_thread

T = TypeVar("T")
ImageT = TypeVar("ImageT")
VideoT = TypeVar("VideoT")
CUT = "\ufdd0\ufdd1"
"""Two characters that Unicode gives to no text."""
_BEFORE = "\n"
_BYTE = re.compile("<0x[0-9A-F]{2}>")
"""A token that stands for one byte of any text, such as unknown text (byte fallback)."""


class ControlTexts:
    """The texts that a tokenizer reads as control tokens: all added tokens except blanks, special or not.

    Of single characters only the special ones count: others are letters that a vocabulary has been given.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = {number: token.content for number, token in tokenizer.added_tokens_decoder.items()}
        added |= dict(zip(tokenizer.all_special_ids, tokenizer.all_special_tokens, strict=True))
        special = {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
        special |= {*tokenizer.all_special_ids}
        whole = {text for text in added.values() if len(text.strip()) > 1}
        lone = {added[number] for number in special - {tokenizer.unk_token_id} if len(added[number].strip()) == 1}
        self.texts = sorted(whole | lone)
        usual = {number for number, text in added.items() if text not in self.texts or _BYTE.fullmatch(text)}
        self._ids = frozenset(added) - usual - {tokenizer.unk_token_id}
        first = "".join(sorted({re.escape(text[0]) for text in whole}))  # tells most places fast from these texts
        alternatives = "|".join(map(re.escape, sorted(whole)))
        self._starts = re.compile(rf"(?=[{first}])(?=(?:{alternatives}))(.)" if whole else "(?!)", re.DOTALL)
        self._lone = re.compile("|".join(map(re.escape, sorted(lone))) or "(?!)")
        self._normalizer = getattr(getattr(tokenizer, "backend_tokenizer", None), "normalizer", None)

    def _number_in(self, text: str) -> int:
        return len(self._starts.findall(text)) + len(self._lone.findall(text))

    def cut(self, text: str) -> str:
        """Return a text with a cut in each control text."""
        if self._normalizer is not None:
            usual = self._normalizer.normalize_str(text)  # a tokenizer may look for added tokens in that
            if self._number_in(usual) > self._number_in(text):
                text = usual
        return self._starts.sub(rf"\1{CUT}", self._lone.sub("?", text))

    def of_others(self, message: Message) -> Turn:
        """Return a message of a tool or user with cuts in its content and name."""
        return {
            key: _with_texts(value, self.cut) if key in ("content", "name") else value for key, value in message.items()
        }

    def described(self, schemas: Sequence[Message]) -> list[Turn]:
        """Return descriptions of tools, which a server may have sent, with cuts in their texts."""
        shown: list[Turn] = _with_texts(list(schemas), lambda text: text if text.isidentifier() else self.cut(text))
        return shown

    def text_of(self, token_ids: Sequence[int], decode: Callable[[Sequence[int]], str]) -> str:
        """Decode tokens, and break up ordinary text that reads like a control token."""
        text = decode(token_ids)
        if self._number_in(text) == self.count(token_ids):
            return text
        shown = ""
        parts = []
        count = 0
        for is_control, run in groupby(token_ids, self._ids.__contains__):
            count += len(list(run))
            before, shown = shown, decode(token_ids[:count])  # some tokenizers drop a blank at the start of a text
            part = shown[len(before) :]
            parts.append(part if is_control else self.cut(part))
        return "".join(parts)

    def count(self, token_ids: Sequence[int]) -> int:
        """Count the control tokens among some tokens."""
        return sum(token in self._ids for token in token_ids)


def uncut(value: T) -> T:
    """Return a message, or any other nested value, without cuts in its texts."""
    changed: T = _with_texts(value, lambda text: text.replace(CUT, ""))
    return changed


def _with_texts(value: Any, change: Callable[[str], str]) -> Any:
    """Replace the texts of a nested value, but not the type of a part of a message."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {change(key): each if key == "type" else _with_texts(each, change) for key, each in value.items()}
    return [_with_texts(each, change) for each in value] if isinstance(value, list | tuple) else value


def text_tokens(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text, whose parts between cuts are encoded one by one."""
    first, *parts = text.split(CUT)
    with one_thread(tokenizer):
        ids: list[int] = tokenizer(first, add_special_tokens=False)["input_ids"]
        for part in parts:
            ids += _tokens_inside(tokenizer, part)
    return ids


def _tokens_inside(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Return the tokens of a text in the middle of another; some tokenizers add a blank at the start of a text."""
    before: list[int] = tokenizer(_BEFORE, add_special_tokens=False)["input_ids"]
    both: list[int] = tokenizer(_BEFORE + text, add_special_tokens=False)["input_ids"]
    if both[: len(before)] == before:
        return both[len(before) :]
    alone: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    return alone


def media_parts(
    text: str, processor: ProcessorMixin, images: Sequence[ImageT], videos: Sequence[VideoT]
) -> Iterator[tuple[str, list[ImageT], list[VideoT]]]:
    """Yield the parts of a text between cuts, each with the images and videos that it has placeholders for."""
    left: dict[str, list[Any]] = {"image": list(images), "video": list(videos)}
    *parts, last = text.split(CUT)
    for part in parts:
        shown = {}
        for kind, items in left.items():
            count = part.count(getattr(processor, f"{kind}_token", CUT))
            shown[kind], left[kind] = items[:count], items[count:]
        yield part, shown["image"], shown["video"]
    yield last, left["image"], left["video"]
