"""Interactivity: a judge's grade of how well the assistant works with the user, 0, 0.5 or 1."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.interactions.base import Message

from ..judge import Judge, shown

LEAST = 1
MOST = 3
PROMPT = """Below is a conversation of a user with an assistant.

Judge how the assistant works with the user, from 1 to 3. Look at the assistant's messages only.
3: it asks for what it has to know, and its messages move the conversation on.
2: it asks some useful questions, or moves on without some that were needed.
1: it asks nothing that it has to know, asks what does not matter, or ignores what the user says.
Reply with one JSON object: {{"reason": "a sentence", "interactivity": 2}}.

[Conversation]
{conversation}"""


async def compute_score(
    data_source: str,
    messages: Sequence[Message],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    judge: Judge,
    **kwargs: Any,
) -> float:
    """Return the judge's grade, mapped from 1..3 to 0..1."""
    number = await judge.number(PROMPT.format(conversation=shown(messages)), "interactivity", LEAST, MOST)
    return (number - LEAST) / (MOST - LEAST)
