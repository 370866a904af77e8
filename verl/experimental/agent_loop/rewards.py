"""Rewards where trajectories are made: one is scored as soon as it ends, while others still grow."""

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from verl.experimental.agent_loop.base import AgentLoopOutput
from verl.experimental.agent_loop.spans import activity
from verl.protocol import DataProto
from verl.workers.rewards.loading import load_reward_manager, reward_kwargs
from verl.workers.rewards.managers import AbstractRewardManager, DAPORewardManager, NaiveRewardManager
from verl.workers.rewards.scoring import FAILURE_COLUMN

SCORING_COLUMNS = ("data_source", "reward_model", "extra_info")
"""Columns of the data set that a reward manager reads; the trainer sends them if loops are to score."""
SCORED_HERE = "score_trajectories"
"""Meta of a batch: whether its trajectories are scored where they are made."""
_ONE_BY_ONE = (NaiveRewardManager, DAPORewardManager)


def scores_one_by_one(reward_fn: Any) -> bool:
    """Whether a reward function is a manager of the configuration that scores each response by itself.

    Others see the whole batch: they may compare its responses, or have many processes.
    """
    return type(reward_fn) in _ONE_BY_ONE and reward_fn.is_of_config


class TrajectoryScorer:
    """The reward manager of a process; it is made at the first trajectory.

    The limits of ``reward_model.scoring`` hold for each response. What share of a batch may fail is for the trainer to
    judge, who sees the batch.

    Attributes: ``extra_keys`` are the names of all that the scorer has returned besides scores.
    """

    def __init__(self, config: DictConfig, tokenizer: PreTrainedTokenizerBase) -> None:
        self._config = config
        self._tokenizer = tokenizer
        self.extra_keys: set[str] = set()
        self._manager: AbstractRewardManager | None = None
        self._thread = ThreadPoolExecutor(1, "scorer")  # a manager has one process, and counts what it has logged

    async def add_score(self, outputs: Sequence[AgentLoopOutput], row: DataProto) -> None:
        """Score a trajectory by its last segment; all its segments get the score, and what the scorer says beyond it.

        Args: ``row`` is the last segment as a row of a batch, with ``SCORING_COLUMNS``.
        """
        if all(output.reward_score is not None for output in outputs):
            return
        with activity("score", "reward", {}) as ended:
            value, extras = await asyncio.get_running_loop().run_in_executor(self._thread, self._score, row)
            ended({"score": value} | extras)
        for output in outputs:
            if output.reward_score is None:
                output.reward_score = value
            output.extra_fields |= extras
        self.extra_keys |= extras.keys()

    def _score(self, row: DataProto) -> tuple[float, dict[str, Any]]:
        if self._manager is None:
            config = self._config
            manager = load_reward_manager(config, self._tokenizer, num_examine=0, **reward_kwargs(config))
            manager.limits = replace(manager.limits, max_failed_ratio=1.0)
            self._manager = manager
        samples, scores = self._manager.score_samples(row, self._manager.score)
        [value] = self._manager.rewards(samples, scores)
        [score] = scores
        return value, score.extras | {FAILURE_COLUMN: score.failure.kind if score.failure else None}
