"""The number of tokens of a text, and a bound of it that needs no tokenization."""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl.utils.tokenizer import one_thread

_CUTS_ONLY = {"Sequence", "Split", "Digits", "Punctuation", "ByteLevel"}
"""Pre-tokenizers that cut a text and add nothing to it, if ``ByteLevel`` adds no space."""
_NFC_GROWTH = 3
"""The most bytes of UTF-8 that NFC makes of one. Source: Unicode FAQ, Normalization, "maximum expansion factors"."""
_NFC_SHRINKAGE = 3
"""The most bytes of UTF-8 of which NFC makes one: U+1FEF becomes a backtick, and three letters of Hangul a syllable."""


def most_tokens(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int] | None:
    """Return a function that bounds the number of tokens of a text from above, without special tokens around it.

    Byte-level byte-pair encoding gives at most one token per byte. None for other tokenizers, and for classes that
    change how transformers calls them.
    """
    backend = _usual_backend(tokenizer)
    if backend is None or type(backend.model).__name__ != "BPE" or not _is_byte_level(backend.pre_tokenizer):
        return None
    normalizer = backend.normalizer
    if normalizer is None:
        return lambda text: len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))
    if type(normalizer).__name__ != "NFC":
        return None
    return lambda text: len(text) if text.isascii() else _NFC_GROWTH * len(text.encode("utf-8", "surrogatepass"))


def fewest_tokens(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], int] | None:
    """Return a function that bounds the number of tokens of a text from below, without special tokens around it.

    A token of byte-level byte-pair encoding stands for no more bytes than the longest one. None for other tokenizers,
    and for those that drop a part of a text.
    """
    backend = _usual_backend(tokenizer)
    if backend is None or type(backend.model).__name__ != "BPE" or not _is_byte_level(backend.pre_tokenizer):
        return None
    added = list(backend.get_added_tokens_decoder().values())
    parts = list(_parts(json.loads(backend.pre_tokenizer.__getstate__())))
    if any(token.lstrip or token.rstrip for token in added) or any(part.get("behavior") == "Removed" for part in parts):
        return None
    longest = max([*map(len, backend.get_vocab(False)), *(len(token.content.encode()) for token in added)])
    normalizer = backend.normalizer
    if normalizer is not None and type(normalizer).__name__ != "NFC":
        return None
    shrinkage = 1 if normalizer is None else _NFC_SHRINKAGE

    def fewest(text: str) -> int:
        if text.isascii():
            return -(-len(text) // longest)
        return -(-len(text.encode("utf-8", "surrogatepass")) // (longest * shrinkage))

    return fewest


def count_tokens(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[int]:
    """Return the number of tokens of each text, without special tokens around it."""
    if not texts:
        return []
    backend = _usual_backend(tokenizer)
    with one_thread(tokenizer):
        if backend is None:
            return [len(ids) for ids in tokenizer(list(texts), add_special_tokens=False)["input_ids"]]
        tokenizer("", add_special_tokens=False)  # it ends truncation and padding that an earlier call has set
        return [len(encoding) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_KNOWN_CUTS = (_GPT2, _CL100K, _CL100K.replace("{1,3}", ""))
"""Patterns of GPT-2, of Llama 3, and of Qwen: their matches cover a text."""
_NOT_PRINTED = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
"""ASCII on which patterns in Rust and in Python may disagree."""
_MOST_WORDS = 1 << 18


class TokenCounter:
    """Counts the tokens of texts, and tokenizes a word once.

    Byte-level byte-pair encoding cuts a text at its added tokens, then into words by a pattern, and encodes each word
    for itself. So the count of a text is the sum of those of its words. That is used for printed ASCII and for patterns
    that Python matches alike; other texts and tokenizers are counted by ``count_tokens``.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._cuts = _cuts(tokenizer)
        self._known: dict[str, int] = {}

    def __call__(self, texts: Sequence[str]) -> list[int]:
        """Return the number of tokens of each text, without special tokens around it."""
        if self._cuts is None:
            return count_tokens(self._tokenizer, texts)
        added, words_of = self._cuts
        words: dict[int, list[str]] = {}
        counts = [0] * len(texts)
        for number, text in enumerate(texts):
            if not text.isascii() or _NOT_PRINTED.search(text):
                continue
            parts = added.split(text) if added is not None else [text]
            counts[number] = len(parts) - 1
            words[number] = [word for part in parts for word in words_of(part)]
        self._learn(words.values())
        for number, found in words.items():
            counts[number] += sum(map(self._known.__getitem__, found))
        others = [number for number in range(len(texts)) if number not in words]
        for number, count in zip(others, count_tokens(self._tokenizer, [texts[i] for i in others]), strict=True):
            counts[number] = count
        return counts

    def _learn(self, found: Iterable[list[str]]) -> None:
        used = set().union(*found)
        new = list(used - self._known.keys())
        if len(new) + len(self._known) > _MOST_WORDS:
            self._known.clear()
            new = list(used)
        self._known.update(zip(new, count_tokens(self._tokenizer, new), strict=True))


Words = Callable[[str], list[str]]


def _cuts(tokenizer: PreTrainedTokenizerBase) -> tuple[re.Pattern[str] | None, Words] | None:
    """Return the pattern of added tokens, or None, and the function that splits the text between them into words.

    None for tokenizers of which the words of a text cannot be told, or not encoded one by one.
    """
    backend = _usual_backend(tokenizer)
    if backend is None or type(backend.model).__name__ != "BPE" or backend.model.dropout:
        return None
    if backend.normalizer is not None and type(backend.normalizer).__name__ != "NFC":  # which leaves ASCII as it is
        return None
    pattern = _pattern_of(backend.pre_tokenizer)
    added = list(backend.get_added_tokens_decoder().values())
    if pattern is None or backend.encode_special_tokens or len({token.normalized for token in added}) > 1:
        return None
    if any(token.lstrip or token.rstrip or token.single_word or not token.content for token in added):
        return None
    longest_first = sorted((token.content for token in added), key=len, reverse=True)
    split = re.compile("|".join(map(re.escape, longest_first))) if added else None
    letters_and_digits = pattern.replace(r"[^\r\n\p{L}\p{N}]", r"[^\r\na-zA-Z0-9]").replace(
        r"[^\s\p{L}\p{N}]", r"[^\sa-zA-Z0-9]"
    )
    return split, re.compile(letters_and_digits.replace(r"\p{L}", "[a-zA-Z]").replace(r"\p{N}", "[0-9]")).findall


def _pattern_of(pre_tokenizer: Any) -> str | None:
    """Return the pattern by which a byte-level pre-tokenizer cuts, if it is a known one."""
    if not _is_byte_level(pre_tokenizer):
        return None
    described = json.loads(pre_tokenizer.__getstate__())
    parts = described["pretokenizers"] if described["type"] == "Sequence" else [described]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return _GPT2 if parts[0].get("use_regex", True) else None
    if [part["type"] for part in parts] != ["Split", "ByteLevel"] or parts[1].get("use_regex", True):
        return None
    pattern = parts[0]["pattern"].get("Regex")
    usual = parts[0]["behavior"] == "Isolated" and not parts[0]["invert"]
    return pattern if usual and pattern in _KNOWN_CUTS else None


def _usual_backend(tokenizer: PreTrainedTokenizerBase) -> Any:
    """Return the tokenizer in Rust; None if there is none, or if a class changes how transformers calls it."""
    for name in ("__call__", "_encode_plus"):
        if getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name):
            return None
    return getattr(tokenizer, "backend_tokenizer", None)


def _is_byte_level(pre_tokenizer: Any) -> bool:
    if pre_tokenizer is None:
        return False
    parts = list(_parts(json.loads(pre_tokenizer.__getstate__())))
    spaces = [part["add_prefix_space"] for part in parts if part["type"] == "ByteLevel"]
    return bool(spaces) and not any(spaces) and {part["type"] for part in parts} <= _CUTS_ONLY


def _parts(described: dict[str, Any]) -> Any:
    yield described
    for part in described.get("pretokenizers", ()):
        yield from _parts(part)
