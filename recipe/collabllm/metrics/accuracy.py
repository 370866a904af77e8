"""Accuracy: 1 if a judge finds that the conversation arrives at the right answer, else 0."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl.interactions.base import Message

from ..judge import Judge, shown, task_of

PROMPT = """Below are a task, its right answer, and a conversation of a user with an assistant about the task.

Decide whether the last answer that the assistant gives to the task agrees with the right answer. A conversation in which the assistant gives no answer is wrong. Reply with one JSON object: {{"reason": "a sentence", "accuracy": 1}} if it agrees, else with "accuracy": 0.

[Task]
{task}

[Right answer]
{answer}

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
    """Return 1 if the judge says that the assistant's last answer is right, else 0."""
    task = task_of(extra_info, messages)
    question = PROMPT.format(task=task, answer=ground_truth, conversation=shown(messages))
    return await judge.number(question, "accuracy", 0, 1)
