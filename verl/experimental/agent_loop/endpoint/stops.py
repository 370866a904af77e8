"""Find stop texts in sampled tokens."""

import os
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING

from verl.workers.rollout.server import FULL, TokenOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Rest:
    """The tokens of an answer after its text: the stop text, or the end of the turn.

    Attributes:
        text: the text of these tokens, whose last one may go beyond the stop text.
        size: how many characters of ``text`` a client writes that adds the stop text to the answer.
        ends_turn: whether the model has ended its turn with these tokens.
    """

    text: str = ""
    size: int = 0
    ends_turn: bool = False

    def taken_from(self, later: str) -> str:
        """Remove this rest from the start of the text after an answer, since the tokens already contain it."""
        shared = len(os.path.commonprefix([self.text, later]))
        return later[shared:] if shared >= self.size else later


def cut_at_stop(
    tokenizer: "PreTrainedTokenizerBase", output: TokenOutput, stops: Sequence[str]
) -> tuple[TokenOutput, str, Rest]:
    """Return an output up to the token that completes a stop text, its text before that, and the rest.

    The engine needs no tokenizer for this, and the tokens stay those that were sampled.
    """
    ids = output.token_ids

    def decoded(count: int) -> str:
        return str(tokenizer.decode(ids[:count], skip_special_tokens=True))

    text = decoded(len(ids))
    if not any(stop in text for stop in stops):
        return output, text, _end_of_turn(tokenizer, output)
    size = bisect_left(range(len(ids)), True, key=lambda count: any(stop in decoded(count) for stop in stops))
    text = decoded(size)
    place, length = min((text.find(stop), len(stop)) for stop in stops if stop in text)
    return first_tokens(output, size), text[:place], Rest(text[place:], length)


def _end_of_turn(tokenizer: "PreTrainedTokenizerBase", output: TokenOutput) -> Rest:
    special = set(tokenizer.all_special_ids)
    last = [*takewhile(special.__contains__, reversed(output.token_ids))][::-1]
    text = str(tokenizer.decode(last, skip_special_tokens=False))
    return Rest(text, len(text), bool(last) and output.finish_reason != FULL)


def first_tokens(output: TokenOutput, size: int) -> TokenOutput:
    """Return the first tokens of an output, as an output with the finish reason ``stop``."""
    versions = []
    left = size
    for version, count in output.versions:
        if left > 0:
            versions.append((version, min(count, left)))
            left -= count
    return replace(
        output,
        token_ids=output.token_ids[:size],
        log_probs=None if output.log_probs is None else output.log_probs[:size],
        finish_reason="stop",
        versions=versions,
    )
