"""Rewards as the trainer computes them."""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray
from torch import Tensor

from verl.workers.reward_manager.loading import get_custom_reward_fn, load_reward_manager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.protocol import DataProto

__all__ = ["compute_reward", "compute_reward_async", "get_custom_reward_fn", "load_reward_manager"]


def reward_kwargs(config: Any) -> dict[str, Any]:
    """Return the arguments of the reward manager that the configuration gives, an overlong buffer among them."""
    node = config.reward_model
    given = dict(node.get("reward_kwargs") or {})
    buffer = node.get("overlong_buffer")
    if buffer and buffer.enable:
        given |= {"max_resp_len": config.data.max_response_length, "overlong_buffer_cfg": buffer}
    return given


def compute_reward(data: "DataProto", reward_fn: Callable[..., Any]) -> tuple[Tensor, dict[str, list[Any]]]:
    """Score a batch.

    Returns: scores (B, R), and what else the scorers said, as lists of length B.
    Raises: RewardError where a scorer fails; a function without ``return_dict`` gives no extras.
    """
    parameters = inspect.signature(reward_fn).parameters.values()
    if not any(p.name == "return_dict" or p.kind is p.VAR_KEYWORD for p in parameters):
        return reward_fn(data), {}
    result = reward_fn(data, return_dict=True)
    if isinstance(result, dict):
        return result["reward_tensor"], result.get("reward_extra_info", {})
    return result, {}


@ray.remote(num_cpus=1)
def compute_reward_async(
    data: "DataProto",
    config: Any = None,
    tokenizer: "PreTrainedTokenizerBase | None" = None,
    reward_fn: Callable[..., Any] | None = None,
) -> tuple[Tensor, dict[str, list[Any]]]:
    """Score a batch in a task of its own, while the workers compute log-probabilities.

    Without ``reward_fn`` one is loaded from ``config`` and ``tokenizer``.
    """
    if reward_fn is None:
        if config is None or tokenizer is None:
            raise ValueError("compute_reward_async needs reward_fn, or config and tokenizer")
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **reward_kwargs(config))
    return compute_reward(data, reward_fn)
