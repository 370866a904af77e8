"""Score each trajectory in its agent loop worker as soon as it ends, while others still grow."""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.rows import TENSORS
from verl.experimental.agent_loop.segments import EARLIER_COLUMN
from verl.experimental.agent_loop.spans import activity
from verl.protocol import DataProto
from verl.workers.rewards.loading import load_reward_manager, reward_kwargs
from verl.workers.rewards.managers import AbstractRewardManager, DAPORewardManager, NaiveRewardManager
from verl.workers.rewards.scoring import FAILURE_COLUMN, reason_of
from verl.workers.rollout.base import DROPPED_COLUMN

_warn_once = cache(logging.getLogger(__name__).warning)

SCORING_COLUMNS = ("data_source", "reward_model", "extra_info")
"""Columns of the data set that a reward manager reads; the trainer sends them if loops are to score."""
SCORED_HERE = "score_trajectories"
"""Meta of a batch: whether the agent loop workers score its trajectories."""
_COUNTS = ("__num_turns__", "tool_call_counts", "segments", "cut_segments", DROPPED_COLUMN, EARLIER_COLUMN)
OWN_COLUMNS = frozenset({"uid", "raw_prompt", "reward_model", "multi_modal_inputs", "multi_modal_data", *_COUNTS})
"""Columns that later phases read, and that no scorer may overwrite: GRPO tells its groups apart by ``uid``."""
_LATER_TENSORS = frozenset(
    "token_level_scores token_level_rewards old_log_probs ref_log_prob values entropys advantages returns "
    "reward_baselines rollout_is_weights sampling_seed trajectory_share".split()
)
RESERVED = OWN_COLUMNS | TENSORS | _LATER_TENSORS | frozenset(SCORING_COLUMNS)
"""Names of the batch that no extra of a scorer takes."""
_ONE_BY_ONE = (NaiveRewardManager, DAPORewardManager)


def scores_one_by_one(reward_fn: Any) -> bool:
    """Whether a reward function is a manager of the configuration that scores each response by itself.

    Others see the whole batch: they may compare its responses, or have many processes.
    """
    return type(reward_fn) in _ONE_BY_ONE and reward_fn.is_of_config


RowsOf = Callable[[Sequence[AgentLoopOutput], DataProto], DataProto]
"""Makes the rows of trajectories, given those of their requests."""
Value = TypeVar("Value")
_Scored = tuple[float, dict[str, Any]]
"""The score of a trajectory, and the extras of the scorer."""


@dataclass
class _Waiting:
    """A trajectory that is to be scored, and its request: a row of a batch."""

    output: AgentLoopOutput
    batch: DataProto
    index: int
    answer: "asyncio.Future[_Scored]"


class TrajectoryScorer:
    """The reward manager of a process, created for the first trajectory.

    Trajectories that end while others are scored are scored together afterwards, which costs far less than one after
    the other. The limits of ``reward_model.scoring`` hold for each response. The trainer, which sees the whole batch,
    checks the share of failures.

    Attributes: ``extra_keys`` are the names of all extras that the scorer has returned.
    """

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase, rows_of: RowsOf) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self._rows_of = rows_of
        self.extra_keys: set[str] = set()
        self._manager: AbstractRewardManager | None = None
        self._thread = ThreadPoolExecutor(1, "scorer")  # a manager has one process, and counts what it has logged
        self._waiting: list[_Waiting] = []
        self._scoring: asyncio.Task[None] | None = None

    async def add_score(self, outputs: Sequence[AgentLoopOutput], batch: DataProto, index: int) -> None:
        """Score a trajectory by its last segment; all its segments get the score and the extras.

        Args: ``batch`` holds the request of the trajectory in row ``index``, with ``SCORING_COLUMNS``.
        """
        if all(output.reward_score is not None for output in outputs):
            return
        with activity("score", "reward", {}) as ended:
            waiting = _Waiting(outputs[-1], batch, index, asyncio.get_running_loop().create_future())
            self._waiting.append(waiting)
            if self._scoring is None or self._scoring.done():
                self._scoring = asyncio.create_task(self._score_waiting())
            value, extras = await waiting.answer
            ended({"score": value} | extras)
        reserved = {self._config.data.reward_fn_key, *(name for output in outputs for name in output.extra_fields)}
        extras = named_extras(extras, reserved, batch.non_tensor_batch.keys())
        for output in outputs:
            if output.reward_score is None:
                output.reward_score = value
            output.extra_fields |= extras
        self.extra_keys |= extras.keys()

    async def _score_waiting(self) -> None:
        while self._waiting:
            first = self._waiting[0].batch
            together = [each for each in self._waiting if each.batch is first]
            self._waiting = [each for each in self._waiting if each.batch is not first]
            # A future that is already done belongs to a cancelled trajectory.
            await self._answer([each for each in together if not each.answer.done()])

    async def _answer(self, together: Sequence[_Waiting]) -> None:
        try:
            scored = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, together)
        except Exception as error:
            if len(together) > 1:  # score one by one, since a single trajectory may be the cause
                for each in together:
                    await self._answer([each])
            elif together and not together[0].answer.done():
                together[0].answer.set_exception(error)
            return
        for each, score in zip(together, scored, strict=True):
            if not each.answer.done():
                each.answer.set_result(score)

    def _score(self, together: Sequence[_Waiting]) -> list[_Scored]:
        if not together:
            return []
        if self._manager is None:
            config = self._config
            manager = load_reward_manager(config, self._tokenizer, num_examine=0, **reward_kwargs(config))
            manager.limits = replace(manager.limits, max_failed_ratio=None)
            self._manager = manager
        requests = together[0].batch.select_idxs([each.index for each in together])
        rows = self._rows_of([each.output.model_copy(update={"earlier": []}) for each in together], requests)
        samples, scores = self._manager.score_samples(rows, self._manager.score)
        values = self._manager.rewards(samples, scores)
        return [
            (value, score.extras | {FAILURE_COLUMN: reason_of(score)})
            for value, score in zip(values, scores, strict=True)
        ]


def named_extras(
    extras: Mapping[str, Value], reserved: Collection[str] = (), data_columns: Collection[str] = ()
) -> dict[str, Value]:
    """Return the extras of scorers under free names: ``extra/<name>`` if the batch already uses the name.

    Args: ``reserved`` are names that are taken besides ``RESERVED``. An extra replaces one of ``data_columns``, as a
        metric of the name that the data have too.
    """
    named: dict[str, Value] = {}
    for name, value in extras.items():
        if name in RESERVED or name in reserved:
            _warn_once(
                "the reward function returns %r, a column of the trainer: it is written as 'extra/%s'", name, name
            )
            name = f"extra/{name}"
        elif name in data_columns:
            _warn_once("the reward function returns %r, a column of the data: it takes the place of the column", name)
        named[name] = value
    return named
