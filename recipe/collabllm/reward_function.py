"""The scorer of conversations; a run sets ``custom_reward_function.path`` to this file.

Importing this file registers the reward manager ``collabllm``.
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
    """Return the metrics of one conversation by name, as an awaitable.

    Args: ``kwargs`` are passed on to the metrics: ``judge``, ``tokenizer`` and ``num_prompt_messages``.
    """
    return measure(data_source, messages, ground_truth, extra_info, metrics, **kwargs)
