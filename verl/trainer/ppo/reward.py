"""Computation of a batch's reward on the trainer's side: by a reward model, a reward function, or both."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Self

import numpy as np
import ray
import torch
from omegaconf import DictConfig
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.errors import RewardError
from verl.experimental.agent_loop.rewards import named_extras, scores_one_by_one
from verl.experimental.agent_loop.segments import EARLIER_COLUMN
from verl.protocol import DataProto, DataProtoFuture, tensors_of
from verl.protocol.lazy import (
    BLOCK_BYTES,
    Block,
    LazyTensor,
    Rows,
    by_reference,
    computed,
    fetched,
    is_lazy,
    register_with_ray,
)
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.metric_utils import without_dropped
from verl.utils.metric import reduce_metrics
from verl.utils.observe.activity import noted_scorer
from verl.utils.process.pool import START_TIMEOUT_S
from verl.utils.process.time_limit import TimeLimitExceeded, time_limit
from verl.utils.py_functional import object_array
from verl.utils.ray_utils import without_nsight
from verl.utils.torch_functional import at_last_sampled, moved_to_sampled
from verl.workers.rewards.loading import get_custom_reward_fn as get_custom_reward_fn
from verl.workers.rewards.loading import load_reward_manager as load_reward_manager
from verl.workers.rewards.loading import reward_kwargs as reward_kwargs
from verl.workers.rewards.model_scores import start_scoring
from verl.workers.rewards.scoring import (
    FAILURE_COLUMN,
    UNAVAILABLE,
    ScoringLimits,
    describe_failure_score,
    describe_scorer,
    exceeds,
    failure_score_of,
    lowest_scores,
    sampled_mask,
)
from verl.workers.rollout.base import DROPPED_COLUMN

logger = logging.getLogger(__name__)

SHOWN_REASONS = 3

ExtraColumns = dict[str, list[Any]]
"""Extra values that scorers return, as lists of length B."""
Reward = tuple[Tensor, ExtraColumns]
"""Token-level scores (B, R), and the extras of the scorers."""
RewardFn = Callable[..., Any]
"""Scores a DataProto: returns scores (B, R), or with ``return_dict=True`` a dict with ``reward_tensor``."""


def compute_reward(data: DataProto, reward_fn: RewardFn, validate: bool = False) -> Reward:
    """Score a batch; a function without the parameter ``return_dict`` gives no extras.

    Responses that cannot be scored get the score of ``failure_score_of``. Where nothing states one, they get the
    smaller of 0 and the lowest score of their data source in the batch; validation computes that from all batches.

    Rows without a trajectory are not shown to the function: their scores are zero, and their extras None. A score on a
    token that the policy did not sample moves to the last sampled one before it.

    The library's reward managers enforce ``batch_timeout_s`` themselves. This function enforces it, with additional
    time to start processes, for managers of users.

    Raises: RewardError when more responses cannot be scored than ``reward_model.scoring.max_failed_ratio`` allows, or
        when the reward function does not end.
    """
    kept = without_dropped(data)
    if kept is not data:
        if not len(kept):
            return torch.zeros(tensors_of(data)["responses"].shape), {}
        return _spread(compute_reward(kept, reward_fn, validate), data.non_tensor_batch[DROPPED_COLUMN].astype(bool))
    limits = getattr(reward_fn, "limits", ScoringLimits())
    name = describe_scorer(getattr(reward_fn, "compute_score", None) or reward_fn)
    try:
        with noted_scorer(name), time_limit(limits.batch_timeout_s + START_TIMEOUT_S):
            scores, extras = _call(data, reward_fn)
    except TimeLimitExceeded as error:
        raise RewardError(
            f"the reward manager {type(reward_fn).__name__}, which calls {name}, did not end within "
            f"reward_model.scoring.batch_timeout_s={limits.batch_timeout_s:g} and {START_TIMEOUT_S:g} s more: "
            f"make it faster, or raise this limit"
        ) from error
    # Columns that agent loops have already named.
    known = set(data.meta_info.get("reward_extra_keys", ())) | {FAILURE_COLUMN}
    reserved = {getattr(reward_fn, "reward_fn_key", "data_source")}
    extras = named_extras(extras, reserved - known, data.non_tensor_batch.keys() - known)
    scores, extras = settled(data, scores, extras, reward_fn)
    scores = moved_to_sampled(scores, sampled_mask(data))
    return scores if validate else _with_lowest(data, scores, extras, reward_fn), extras


def _with_lowest(data: DataProto, scores: Tensor, extras: ExtraColumns, reward_fn: RewardFn) -> Tensor:
    """Give failures whose score nothing states the smaller of 0 and the lowest score of their data source."""
    reasons = extras.get(FAILURE_COLUMN, [])
    if all(reason is None for reason in reasons):
        return scores
    sources = _sources(data, reward_fn)
    lowest = lowest_scores(sources, scores.sum(-1).tolist(), [reason is not None for reason in reasons])
    unstated = {source for source in lowest if failure_score_of(reward_fn, source) is None}
    pairs = zip(sources, reasons, strict=True)
    rows = torch.tensor([reason is not None and source in unstated for source, reason in pairs])
    values = at_last_sampled(scores.new_tensor([lowest[source] for source in sources]), sampled_mask(data))
    return torch.where(rows.unsqueeze(-1), values, scores)


def _sources(data: DataProto, reward_fn: RewardFn) -> list[str]:
    key = getattr(reward_fn, "reward_fn_key", "data_source")
    return list(data.non_tensor_batch.get(key, ["unknown"] * len(data)))


class NothingScoredError(RewardError):
    """No response of a step could be scored."""


def refuse_nothing_scored(batch: DataProto, step: int, reward_fn: RewardFn | None) -> None:
    """Raise NothingScoredError with the first reasons if no response of the batch could be scored.

    Training on would set all rewards to one value. A ratio that the user wrote decides instead.
    """
    limits: ScoringLimits = getattr(reward_fn, "limits", ScoringLimits())
    found = batch.non_tensor_batch
    reasons = found.get(FAILURE_COLUMN)
    if limits.max_failed_ratio is not None or reasons is None:
        return
    is_kept = ~found.get(DROPPED_COLUMN, np.zeros(len(batch), dtype=bool)).astype(bool)
    if not is_kept.any() or any(reason is None for reason in reasons[is_kept]):
        return
    texts = dict.fromkeys(getattr(reason, "text", str(reason)) for reason in reasons[is_kept])
    first = "; ".join(f"({number}) {text}" for number, text in enumerate(list(texts)[:SHOWN_REASONS], 1))
    raise NothingScoredError(
        f"step {step}: none of the {int(is_kept.sum())} responses could be scored: {first}. Correct the scorer; or "
        "write reward_model.scoring.max_failed_ratio=1 to train on"
    )


def leave_unscored_out(batch: DataProto, group: RayWorkerGroup, step: int) -> None:
    """Take the responses out of their groups that were not scored for a reason which no response can cause.

    Their rows stay, as those without a trajectory: their ``response_mask`` is 0. With ReMax that includes responses
    whose baseline was not scored.

    Raises: RewardError if no response is left.
    """
    found = batch.non_tensor_batch
    rows = np.array([reason == UNAVAILABLE for reason in found.get(FAILURE_COLUMN, [None] * len(batch))])
    tensors = tensors_of(batch)
    if "reward_baselines" in tensors.keys():
        unknown = tensors["reward_baselines"].isnan()
        rows |= unknown.numpy()
        tensors["reward_baselines"] = tensors["reward_baselines"].masked_fill(unknown, 0.0)
    if not rows.any():
        return
    dropped = found.get(DROPPED_COLUMN, np.zeros(len(batch), dtype=bool)).astype(bool) | rows
    if dropped.all():
        raise RewardError(
            f"step {step}: no response could be scored: a service that the scorer asks did not answer, or its process "
            "lacks something; the log has the first failure"
        )
    found[DROPPED_COLUMN] = dropped
    if EARLIER_COLUMN in found:
        segments = zip(found[EARLIER_COLUMN], rows, strict=True)
        found[EARLIER_COLUMN] = object_array([None if is_out else earlier for earlier, is_out in segments])
    unscored = torch.from_numpy(rows)
    cleared = tensors_of(computed(_without_rows, batch, ["response_mask"], group=group, rows=unscored))
    tensors["response_mask"] = cleared["response_mask"]


def _without_rows(data: DataProto) -> DataProto:
    """Return the response mask with zeros in the given ``rows``, (B,) bool."""
    mask = tensors_of(data)["response_mask"]
    return DataProto.from_dict({"response_mask": mask.masked_fill(data.meta_info["rows"].unsqueeze(-1), 0)})


def _spread(reward: Reward, dropped: np.ndarray) -> Reward:
    """Give rows that were not scored, (B,) bool, a score of zero and extras of None."""
    scores, extras = reward
    rows = torch.from_numpy(np.flatnonzero(~dropped))
    whole = scores.new_zeros(len(dropped), scores.shape[-1]).index_copy_(0, rows.to(scores.device), scores)
    spread: ExtraColumns = {name: [None] * len(dropped) for name in extras}
    for name, values in extras.items():
        for row, value in zip(rows.tolist(), values, strict=True):
            spread[name][row] = value
    return whole, spread


def _call(data: DataProto, reward_fn: RewardFn) -> Reward:
    parameters = inspect.signature(reward_fn).parameters.values()
    if not any(p.name == "return_dict" or p.kind is p.VAR_KEYWORD for p in parameters):
        return reward_fn(data), {}
    result = reward_fn(data, return_dict=True)
    if isinstance(result, dict):
        return result["reward_tensor"], result.get("reward_extra_info", {})
    return result, {}


def settled(data: DataProto, scores: Tensor, extras: ExtraColumns, reward_fn: RewardFn) -> Reward:
    """Give the score of a failure to rows of (B, R) scores that hold NaN or an infinity, and count them as failures.

    Our reward managers do this for each scorer. Reward models and custom managers need it here: one such row would
    make all advantages of a whitened batch NaN.

    Raises: RewardError when more rows fail than ``reward_model.scoring`` allows.
    """
    bad = ~scores.isfinite().all(-1)
    if not bad.any():
        return scores, extras
    limits: ScoringLimits = getattr(reward_fn, "limits", ScoringLimits())
    rows = bad.nonzero().flatten().tolist()
    sources = _sources(data, reward_fn)
    text = (
        f"{len(rows)} of {len(scores)} responses have a score that is not a finite number, the first in row {rows[0]} "
        f"of the batch, data_source {sources[rows[0]]!r}"
    )
    if exceeds(len(rows), len(scores), limits):
        limit = f"reward_model.scoring.max_failed_ratio={limits.max_failed_ratio:g}"
        raise RewardError(f"{text}: more than {limit}. Correct the reward, or raise this limit")
    logger.warning("%s: they get %s", text, describe_failure_score(limits))
    values = scores.new_tensor([failure_score_of(reward_fn, source) or 0.0 for source in sources])
    scores = torch.where(bad.unsqueeze(-1), at_last_sampled(values, sampled_mask(data)), scores)
    kinds = list(extras.get(FAILURE_COLUMN, [None] * len(scores)))
    return scores, extras | {FAILURE_COLUMN: [kinds[i] or ("invalid" if bad[i] else None) for i in range(len(scores))]}


@ray.remote(num_cpus=1)
def compute_reward_async(
    data: DataProto,
    config: DictConfig | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
    reward_fn: RewardFn | None = None,
) -> Reward:
    """Score a batch in a Ray task, while the workers compute log-probabilities.

    Without ``reward_fn``, it loads one from ``config`` and ``tokenizer``.
    """
    if reward_fn is None:
        if config is None or tokenizer is None:
            raise ValueError("compute_reward_async needs reward_fn, or config and tokenizer")
        reward_fn = load_reward_manager(config, tokenizer, num_examine=0, **reward_kwargs(config))
    return compute_reward(data, reward_fn)


_BYTES_OF_A_TASK = 1 << 30
"""Columns by reference that one scoring task reads, if the reward function judges each response by itself."""


@ray.remote(num_cpus=1)
def compute_reward_by_reference(data: DataProto, reward_fn: RewardFn, num_blocks: int) -> list[Any]:
    """Score a batch with columns by reference in a Ray task, which reads them.

    Returns: the scores as ``StoredScores``, and then ``num_blocks`` blocks of them. The caller owns the blocks, so they
        outlive the process of the task.
    """
    scores, extras = compute_reward(fetched(data), reward_fn)
    blocks: list[Any] = []

    def number_of(block: Block) -> int:
        blocks.append(block)
        return len(blocks) - 1

    width = -(-len(scores) // num_blocks) * scores[0].numel() * scores.element_size()
    stored = by_reference(DataProto.from_dict({_SCORES: scores}), put=number_of, block_bytes=width)
    column = tensors_of(stored)[_SCORES]
    assert isinstance(column, LazyTensor)
    blocks += [Block()] * (num_blocks - len(blocks))
    return [(column.places, tuple(scores.shape[1:]), scores.dtype, extras), *blocks]


_SCORES = "token_level_scores"


class ScoresByReference:
    """The scores of a batch with columns by reference, by Ray tasks that have begun: the driver reads no column.

    A reward function that judges each response by itself gets the batch in parts, and so
    ``reward_model.scoring.max_failed_ratio`` counts in each part.
    """

    def __init__(self, batch: DataProto, reward_fn: RewardFn, num_cpus: int) -> None:
        tensors = tensors_of(batch)
        row_bytes = sum(value[:1].numel() * value.element_size() for value in tensors.values())
        most = max(1, _BYTES_OF_A_TASK // max(1, row_bytes)) if scores_one_by_one(reward_fn) else len(batch)
        register_with_ray()
        task: Any = compute_reward_by_reference.options
        score_bytes = tensors["responses"].shape[-1] * 4
        self._refs: list[list[ray.ObjectRef[Any]]] = []
        for part in batch.split(most):
            num_blocks = max(1, -(-len(part) * score_bytes // BLOCK_BYTES))
            options = {"num_returns": 1 + num_blocks, "num_cpus": num_cpus, **without_nsight()}
            self._refs.append(task(**options).remote(part, reward_fn, num_blocks))

    def result(self, timeout_s: float | None) -> Reward:
        """Return the scores by reference, and the extras.

        Raises: GetTimeoutError after ``timeout_s``.
        """
        heads = ray.get([refs[0] for refs in self._refs], timeout=timeout_s)
        parts: list[Tensor] = []
        extras: ExtraColumns = {}
        for (places, row_shape, dtype, found), (_, *blocks) in zip(heads, self._refs, strict=True):
            rows = places.rows
            rows = Rows([blocks[number] for number in rows.blocks], rows.block, rows.row)
            parts.append(LazyTensor(_SCORES, replace(places, rows=rows), row_shape, dtype))
            before = sum(len(part) for part in parts[:-1])
            for name in {*extras, *found}:
                values = extras.get(name, [None] * before)
                extras[name] = values + list(found.get(name, [None] * len(parts[-1])))
        return torch.cat(parts) if len(parts) > 1 else parts[0], extras

    def cancel(self) -> None:
        """End the tasks."""
        for refs in self._refs:
            ray.cancel(refs[0], force=True)


@dataclass
class PendingReward:
    """The reward of one batch: the reward model scores it first, then the reward function.

    Either may run while the driver continues.

    Attributes:
        reward_fn: the reward function.
        reward_model: worker group of the reward model; None if there is none.
        own_pool: whether the reward model has its own devices, so that the driver need not wait for it.
        in_task: whether the reward function runs in a Ray task (``reward_model.launch_reward_fn_async``).
        num_cpus: CPU cores that such a task reserves.
        timeout_s: seconds to wait for such a task; None for no limit.
    """

    reward_fn: RewardFn
    reward_model: RayWorkerGroup | None = None
    own_pool: bool = False
    in_task: bool = False
    num_cpus: int = 1
    timeout_s: float | None = None
    _model_scores: DataProtoFuture | None = field(init=False, default=None)
    _rule: Reward | ray.ObjectRef[Reward] | ScoresByReference | None = field(init=False, default=None)

    def start(self, batch: DataProto, metrics: dict[str, float]) -> Self:
        """Start scoring; ``take`` does the part that must wait."""
        if self.reward_model is not None and "rm_scores" not in tensors_of(batch).keys():
            self._model_scores = start_scoring(self.reward_model, batch)
            if self.own_pool:
                return self
        self._start_rule(batch, metrics)
        return self

    def take(self, batch: DataProto, metrics: dict[str, float]) -> Reward:
        """Wait for both scorers; return token-level scores (B, R) and the extras of the reward function.

        The batch then also holds the scores of the reward model, as ``rm_scores`` (B, R).
        Raises: WorkerError when the reward model dies or exceeds the deadline of its group; RewardError when the task
            of the reward function exceeds ``timeout_s``, which ends it.
        """
        if self._model_scores is not None:
            self._start_rule(batch, metrics)
        rule = self._rule
        self._rule = None
        assert rule is not None, "take() needs start(), and works once"
        if isinstance(rule, ray.ObjectRef | ScoresByReference):
            try:
                if isinstance(rule, ScoresByReference):
                    return rule.result(self.timeout_s)
                return ray.get(rule, timeout=self.timeout_s)
            except ray.exceptions.GetTimeoutError as error:
                rule.cancel() if isinstance(rule, ScoresByReference) else ray.cancel(rule, force=True)
                raise RewardError(
                    f"the task of {describe_scorer(self.reward_fn)} did not end within "
                    f"trainer.worker_call_timeout_s={self.timeout_s:g}: "
                    f"make it faster, or raise this limit"
                ) from error
        return rule

    def _start_rule(self, batch: DataProto, metrics: dict[str, float]) -> None:
        """Add the scores of the reward model to the batch, then call the reward function or start its task."""
        if self._model_scores is not None:
            output = self._model_scores.get()
            self._model_scores = None
            metrics.update(reduce_metrics(output.meta_info.pop("metrics", {})))
            tensors_of(batch)["rm_scores"] = tensors_of(output)["rm_scores"]
        if is_lazy(batch):
            self._rule = ScoresByReference(batch, self.reward_fn, self.num_cpus)
            return
        if not self.in_task:
            self._rule = compute_reward(batch, self.reward_fn)
            return
        # Ray's types know no arguments with a default.
        task: Any = compute_reward_async.options(num_cpus=self.num_cpus, **without_nsight())
        self._rule = task.remote(data=batch, reward_fn=self.reward_fn)


def new_reward(
    run: RunConfig, reward_fn: RewardFn, reward_model: RayWorkerGroup | None, device_name: str
) -> PendingReward:
    """Return the reward of a batch, not started yet, as the configuration scores it."""
    options = run.reward_model
    return PendingReward(
        reward_fn,
        reward_model,
        own_pool=options.enable_resource_pool,
        in_task=options.launch_reward_fn_async,
        # On CPU every core may belong to a worker: a task that asks for one would never start.
        num_cpus=0 if device_name == "cpu" else 1,
        timeout_s=run.trainer.worker_call_timeout_s,
    )


def add_scores(
    pending: PendingReward,
    batch: DataProto,
    metrics: dict[str, float],
    reward_fn: RewardFn | None,
    group: RayWorkerGroup,
    step: int,
) -> list[str]:
    """Wait for a reward, and add scores and extras to the batch; return the names of the extras.

    Raises: RewardError if no response could be scored.
    """
    scores, extras = pending.take(batch, metrics)
    tensors_of(batch)["token_level_scores"] = scores
    for name, values in extras.items():  # one axis only: values that are lists stay lists
        batch.non_tensor_batch[name] = np.fromiter(values, dtype=object, count=len(values))
    refuse_nothing_scored(batch, step, reward_fn)
    leave_unscored_out(batch, group, step)
    return list(extras)
