"""Rewards as the trainer computes them."""

import inspect
import logging
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any, Self

import ray
import torch
from torch import Tensor

from verl.protocol import DataProto, DataProtoFuture
from verl.utils.metric import reduce_metrics
from verl.utils.ray_utils import without_nsight
from verl.workers.rewards.loading import get_custom_reward_fn, load_reward_manager
from verl.workers.rewards.scoring import FAILURE_COLUMN, RewardError, ScoringLimits

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.trainer.ppo.ray_trainer import RayPPOTrainer

__all__ = ["PendingReward", "compute_reward", "compute_reward_async", "get_custom_reward_fn", "load_reward_manager"]

logger = logging.getLogger(__name__)

Reward = tuple[Tensor, dict[str, list[Any]]]

OWN_COLUMNS = frozenset(
    {"uid", "raw_prompt", "reward_model", "multi_modal_inputs", "multi_modal_data", "__num_turns__", "tool_call_counts"}
)
"""Columns that later phases read: the groups of GRPO are told by ``uid``, which no scorer may write over."""


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
    Raises: RewardError where more scorers fail than may; a function without ``return_dict`` gives no extras.
    """
    scores, extras = _call(data, reward_fn)
    for name in OWN_COLUMNS & extras.keys():
        _tell_own_column(name)
    extras = {name: values for name, values in extras.items() if name not in OWN_COLUMNS}
    return settled(data, scores, extras, limits=getattr(reward_fn, "limits", ScoringLimits()))


@cache
def _tell_own_column(name: str) -> None:
    logger.warning("the reward function returns %r, a name of the trainer's own, which keeps its values", name)


def _call(data: "DataProto", reward_fn: Callable[..., Any]) -> Reward:
    parameters = inspect.signature(reward_fn).parameters.values()
    if not any(p.name == "return_dict" or p.kind is p.VAR_KEYWORD for p in parameters):
        return reward_fn(data), {}
    result = reward_fn(data, return_dict=True)
    if isinstance(result, dict):
        return result["reward_tensor"], result.get("reward_extra_info", {})
    return result, {}


def settled(data: "DataProto", scores: Tensor, extras: dict[str, list[Any]], limits: ScoringLimits) -> Reward:
    """Return the scores (B, R) with the failure score in rows that hold NaN or an infinity, which count as failures.

    The managers do so with what a scorer returns; this is for the scores of reward models and of managers of the
    user's, of which one such row would make all advantages of a whitened batch NaN.

    Raises: RewardError where they are more of the batch than may fail.
    """
    bad = ~scores.isfinite().all(-1)
    if not bad.any():
        return scores, extras
    rows, width = bad.nonzero().flatten().tolist(), scores.shape[-1]
    text = (
        f"{len(rows)} of {len(scores)} responses have a score that is no finite number, the first in row {rows[0]} of "
        f"the batch, data_source {data.non_tensor_batch.get('data_source', ['unknown'] * len(scores))[rows[0]]!r}"
    )
    if len(rows) / len(scores) > limits.max_failed_ratio:
        raise RewardError(f"{text}: more than reward_model.scoring.max_failed_ratio={limits.max_failed_ratio:g}")
    logger.warning("%s: they get reward_model.scoring.failure_score=%g", text, limits.failure_score)
    attended = data.batch["attention_mask"][:, -width:]
    last = (attended * torch.arange(1, width + 1)).amax(-1).sub(1).clamp(min=0)
    scores = scores.masked_fill(bad.unsqueeze(-1), 0.0)
    scores[bad, last[bad]] = limits.failure_score
    kinds = list(extras.get(FAILURE_COLUMN, [None] * len(scores)))
    return scores, extras | {FAILURE_COLUMN: [kinds[i] or ("invalid" if bad[i] else None) for i in range(len(scores))]}


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


class PendingReward:
    """The reward of one batch: the scores of the reward model, where there is one, and then the reward function.

    Either may run while the driver goes on: a reward model with devices of its own, and by
    ``reward_model.launch_reward_fn_async`` the function.
    """

    def __init__(self, trainer: "RayPPOTrainer") -> None:
        self.trainer = trainer
        self._model_scores: DataProtoFuture | None = None
        self._rule: Any = None

    def start(self, batch: DataProto, metrics: dict[str, Any]) -> Self:
        """Begin to score a batch, as far as nothing has to be waited for that runs beside."""
        if self.trainer.use_rm and "rm_scores" not in batch.batch.keys():
            self._model_scores = self.trainer.rm_wg.start_rm_score(_for_reward_model(batch))
            if self.trainer.config.reward_model.enable_resource_pool:
                return self
        self._start_rule(batch, metrics)
        return self

    def take(self, batch: DataProto, metrics: dict[str, Any]) -> Reward:
        """Return token-level scores (B, R) and what else the reward function said, waiting for both.

        The scores of the reward model are in the batch then, as ``rm_scores`` (B, R).
        Raises: WorkerError when the reward model dies or exceeds the deadline of its group.
        """
        if self._model_scores is not None:
            self._start_rule(batch, metrics)
        pending, self._rule = self._rule, None
        if isinstance(pending, ray.ObjectRef):
            pending = ray.get(pending, timeout=self.trainer.config.trainer.worker_call_timeout_s)
        scores, extras = pending
        return scores, extras

    def _start_rule(self, batch: DataProto, metrics: dict[str, Any]) -> None:
        """Take over the scores of the reward model, and call the reward function on them or start it."""
        trainer, scores = self.trainer, self._model_scores
        if scores is not None:
            self._model_scores, output = None, scores.get()
            metrics.update(reduce_metrics(output.meta_info.pop("metrics", {})))
            batch.batch["rm_scores"] = output.batch["rm_scores"]
        if not trainer.config.reward_model.launch_reward_fn_async:
            self._rule = compute_reward(batch, trainer.reward_fn)
            return
        # On CPU every core may belong to a worker: a task that asks for one would never start.
        cores = {"num_cpus": 0} if trainer.device_name == "cpu" else {}
        task = compute_reward_async.options(**cores, **without_nsight())
        self._rule = task.remote(data=batch, reward_fn=trainer.reward_fn)


def _for_reward_model(batch: DataProto) -> DataProto:
    """Return what the reward model reads; its pool need not have as many workers as divide the batch."""
    columns, read = batch.non_tensor_batch, ("raw_prompt", "reward_model", "multi_modal_inputs")
    return DataProto.from_dict(
        tensors={name: batch.batch[name] for name in ("input_ids", "attention_mask", "position_ids", "responses")},
        non_tensors={name: columns[name] for name in read if name in columns},
        meta_info={"global_steps": batch.meta_info.get("global_steps")},
        auto_padding=True,
    )
