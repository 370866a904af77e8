"""BLEU, from 0 to 1: how close the document that the conversation produced is to the reference."""

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from verl.interactions.base import Message

from ..judge import Judge, shown

MOST_WORDS = 4
PROMPT = """Below is a conversation of a user with an assistant, which writes a document.

Copy the last version of the document, word by word, without anything around it. Reply with one JSON object: {{"document": "the text"}}. If there is no document, the text is empty.

[Conversation]
{conversation}"""  # noqa: E501 (the text of a prompt)


async def compute_score(
    data_source: str,
    messages: Sequence[Message],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    judge: Judge,
    **kwargs: Any,
) -> float:
    """Return the BLEU of the document that the judge extracts from the conversation."""
    document = await judge.verdict(PROMPT.format(conversation=shown(messages)), "document")
    return bleu(str(document or ""), str(ground_truth))


def bleu(candidate: str, reference: str) -> float:
    """Return the smoothed BLEU of a text against one reference.

    It is the geometric mean of the n-gram precisions for n from 1 to 4, times the brevity penalty
    ``exp(1 - reference / candidate)`` for a text shorter than the reference. Smoothing adds one to the matches and the
    counts for n above 1.

    Source: Papineni et al., "BLEU" (2002), section 2; smoothing: Lin and Och, "ORANGE" (2004), section 4.
    """
    said = words(candidate)
    wanted = words(reference)
    if not said or not wanted:
        return float(said == wanted)
    logs = []
    for size in range(1, MOST_WORDS + 1):
        grams = ngrams(said, size)
        others = ngrams(wanted, size)
        smooth = int(size > 1)
        hits = (grams & others).total() + smooth
        if not hits:
            return 0.0
        logs.append(math.log(hits / (grams.total() + smooth)))
    return math.exp(sum(logs) / MOST_WORDS + min(0.0, 1 - len(wanted) / len(said)))


def words(text: str) -> list[str]:
    """Split a text into words and punctuation marks, in lower case."""
    return re.findall(r"\w+|[^\w\s]", text.lower())


def ngrams(tokens: Sequence[str], size: int) -> Counter[tuple[str, ...]]:
    """Return the number of occurrences of each n-gram of ``size`` words."""
    return Counter(tuple(tokens[place : place + size]) for place in range(len(tokens) - size + 1))
