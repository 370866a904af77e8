"""Stop texts, found in what was sampled."""

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from verl.workers.rollout.server import TokenOutput

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def cut_at_stop(
    tokenizer: "PreTrainedTokenizerBase", output: TokenOutput, stops: Sequence[str]
) -> tuple[TokenOutput, str]:
    """Return an output up to the token that completes a stop text, and its text before that.

    The engine needs no tokenizer for this, and the tokens stay those that were sampled.
    """
    ids = output.token_ids

    def decoded(count: int) -> str:
        return str(tokenizer.decode(ids[:count], skip_special_tokens=True))

    text = decoded(len(ids))
    places = [text.find(stop) for stop in stops if stop in text]
    if not places:
        return output, text
    size = bisect_left(range(len(ids)), True, key=lambda count: any(stop in decoded(count) for stop in stops))
    return first_tokens(output, size), text[: min(places)]


def first_tokens(output: TokenOutput, size: int) -> TokenOutput:
    """Return the first tokens of an output, as one that ended by itself."""
    versions, left = [], size
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
