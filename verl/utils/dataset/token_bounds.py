"""The number of tokens of a text, and a bound of it that needs no tokenization."""

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from verl.utils.tokenizer import one_thread

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import PreTokenizer

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
        tokenizer("", add_special_tokens=False)  # this call resets truncation and padding of earlier calls
        return [len(encoding) for encoding in backend.encode_batch_fast(texts, add_special_tokens=False)]


def _usual_backend(tokenizer: PreTrainedTokenizerBase) -> "Tokenizer | None":
    """Return the tokenizer in Rust; None if there is none, or if a class changes how transformers calls it."""
    for name in ("__call__", "_encode_plus"):
        if getattr(type(tokenizer), name, None) is not getattr(PreTrainedTokenizerFast, name):
            return None
    return getattr(tokenizer, "backend_tokenizer", None)


def _is_byte_level(pre_tokenizer: "PreTokenizer | None") -> bool:
    if pre_tokenizer is None:
        return False
    parts = list(_parts(json.loads(pre_tokenizer.__getstate__())))
    spaces = [part["add_prefix_space"] for part in parts if part["type"] == "ByteLevel"]
    return bool(spaces) and not any(spaces) and {part["type"] for part in parts} <= _CUTS_ONLY


def _parts(described: dict[str, Any]) -> Any:
    yield described
    for part in described.get("pretokenizers", ()):
        yield from _parts(part)
