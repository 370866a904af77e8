"""Write the conversations of a process as tokens, in threads: the event loop stays free for all trajectories."""

import asyncio
import copy
import hashlib
import json
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, TypeVar

from cachetools import LRUCache

from verl.experimental.agent_loop.endpoint.requests import RequestError
from verl.utils.chat import ChatFormat
from verl.utils.concurrency import in_thread
from verl.utils.dataset.token_bounds import fewest_tokens
from verl.utils.json_types import Json, JsonObject
from verl.utils.process.time_limit import TimeLimitExceeded, time_limit
from verl.utils.tokenizer import one_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

T = TypeVar("T")
MOST_CACHE_BYTES = 256 * 2**20
ENCODE_TIMEOUT_S = 60.0
_LONG = 1 << 18
"""The most characters of a text that the shared tokenizer encodes; a copy of the tokenizer encodes longer texts."""


class Templates:
    """A cache of the policy's chat formats, one for each list of tools in the prompt.

    Args:
        options: further arguments of the chat template.
        cache_bytes: the most memory of the formats that are kept.
        encode_s: the most seconds to render and encode the messages of a request.
    """

    def __init__(
        self,
        tokenizer: "PreTrainedTokenizerBase",
        options: Mapping[str, Json],
        cache_bytes: int = MOST_CACHE_BYTES,
        encode_s: float = ENCODE_TIMEOUT_S,
    ) -> None:
        self.tokenizer = tokenizer
        self.fewest_tokens = fewest_tokens(tokenizer)
        self._options = dict(options)
        self._encode_s = encode_s
        self._formats: LRUCache[bytes, ChatFormat] = LRUCache(cache_bytes, lambda form: size_in_memory(form.tools))
        self._copying = threading.Lock()

    def of(self, tools: Sequence[JsonObject]) -> ChatFormat:
        """Return the format with these tools; it is proven once.

        Raises: ChatFormatError if a conversation cannot be written in pieces.
        """
        key = hashlib.sha256(json.dumps(tools).encode()).digest()
        form = self._formats.get(key)
        if form is None:
            form = self._bare.with_options(self._options, tools)
            form.prove()
            if self._formats.getsizeof(form) <= self._formats.maxsize:
                self._formats[key] = form
        return form

    async def write(self, size: int, work: "Callable[[Templates], T]") -> T:
        """Run ``work``, on texts with so many characters, in the one thread that has the tokenizer; return its result.

        Raises: RequestError if the work takes too long; any error that ``work`` raises.
        """
        is_given_up = threading.Event()

        def written() -> T:
            templates = self if size <= _LONG else self._of_long
            with one_thread(templates.tokenizer):
                if is_given_up.is_set():
                    raise self._too_slow()
                try:
                    with time_limit(self._encode_s):
                        return work(templates)
                except TimeLimitExceeded:
                    raise self._too_slow() from None

        limit = asyncio.timeout(self._encode_s)
        try:
            async with limit:
                return await in_thread(written, "write conversations")
        except TimeoutError:
            if limit.expired():
                raise self._too_slow() from None
            raise
        finally:
            is_given_up.set()

    def _too_slow(self) -> RequestError:
        return RequestError(
            f"the texts were not written as tokens within {self._encode_s:g} s: shorten them", "messages"
        )

    @cached_property
    def _bare(self) -> ChatFormat:
        return ChatFormat(self.tokenizer, options=self._options)

    @property
    def _of_long(self) -> "Templates":
        """The templates for long texts, with a separate tokenizer."""
        with self._copying:
            return self._copied

    @cached_property
    def _copied(self) -> "Templates":
        with one_thread(self.tokenizer):
            return Templates(copy.deepcopy(self.tokenizer), self._options, int(self._formats.maxsize), self._encode_s)


def texts_in(value: Json) -> Iterator[str]:
    """Yield the texts in a value of JSON."""
    return (each for each in _parts(value) if isinstance(each, str))


def size_in_memory(value: Json) -> int:
    """Return about how many bytes a value of JSON takes."""
    return sum(map(sys.getsizeof, _parts(value)))


def _parts(value: Json) -> Iterator[Json]:
    """Yield a value of JSON and all that it holds; a deep one needs no deep stack."""
    left = [value]
    while left:
        each = left.pop()
        yield each
        if isinstance(each, Mapping):
            left += [*each, *each.values()]
        elif isinstance(each, list):
            left += each
