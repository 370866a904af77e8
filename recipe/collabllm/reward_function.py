"""The scorer of conversations; a run names this file in ``custom_reward_function.path``.

Its import registers the reward manager ``collabllm``.
"""

from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

from verl.interactions.base import Message

from .reward_manager import measure


def conversation_level_reward_func(
    data_source: str,
    messages: Sequence[Message],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    metrics: Sequence[str],
    **kwargs: Any,
) -> Awaitable[dict[str, float]]:
    """Measure one conversation; the manager awaits the metrics, by their names.

    Args: ``kwargs`` go to the metrics: ``judge``, ``tokenizer`` and ``num_prompt_messages``.
    """
    return measure(data_source, messages, ground_truth, extra_info, metrics, **kwargs)
