"""Token amount: the number of tokens in all messages after the prompt, the user's and the assistant's."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from verl.interactions.base import Message, text_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


async def compute_score(
    data_source: str,
    messages: Sequence[Message],
    ground_truth: Any,
    extra_info: Mapping[str, Any],
    *,
    tokenizer: "PreTrainedTokenizerBase",
    num_prompt_messages: int,
    **kwargs: Any,
) -> float:
    """Return the number of tokens; a negative weight in ``metric_weights`` rewards short conversations."""
    texts = [text_of(message) for message in messages[num_prompt_messages:]]
    return float(sum(len(tokenizer.encode(text, add_special_tokens=False)) for text in texts))
