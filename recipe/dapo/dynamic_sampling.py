"""Dynamic sampling: keep only prompts whose responses differ in a metric."""

import logging
from numbers import Real
from typing import TYPE_CHECKING

import numpy as np

from verl.errors import WrongInput
from verl.workers.rewards.scoring import FAILURE_COLUMN

if TYPE_CHECKING:
    from verl.algos.config import FilterGroupsConfig
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)

FEWEST_FRUITLESS = 10
"""Draws in a row without a kept prompt that a step allows at least, even if an epoch has fewer draws.

On a small data set the prompts are then drawn again, and their new responses may differ.
"""
MOST_FRUITLESS = 100
"""Draws in a row without a kept prompt that a step allows at most: on a large data set a part is evidence enough."""
SUMS = {"seq_reward": "token_level_scores", "seq_final_reward": "token_level_rewards"}


def metric_values(batch: "DataProto", metric: str, extras: list[str]) -> np.ndarray:
    """Return the metric of every response, (B,) float64; NaN where the scorer failed or returned no such metric.

    ``seq_reward`` is the sum of ``token_level_scores``. ``seq_final_reward`` is the sum of ``token_level_rewards``,
    which equal the scores if the reward has no KL term. ``score`` is the score before the overlong penalty; without
    such a penalty it is the sum of ``token_level_scores``. Any other name must be one of the ``extras``, the further
    values that the reward function returns.

    Raises: WrongInput for an unknown name, listing the known ones.
    """
    values = _given_values(batch, metric, extras)
    for row, failure in enumerate(batch.non_tensor_batch.get(FAILURE_COLUMN, ())):
        if failure is not None:
            values[row] = np.nan  # the score given for a failed scorer says nothing about the response
    return values


def _given_values(batch: "DataProto", metric: str, extras: list[str]) -> np.ndarray:
    if metric not in extras and metric in ("score", *SUMS):
        assert batch.batch is not None
        column = SUMS.get(metric, "token_level_scores")
        column = column if column in batch.batch.keys() else "token_level_scores"
        return batch.batch[column].sum(-1).double().numpy()
    key = f"algorithm.filter_groups.metric={metric}"
    if metric not in extras:
        known = ", ".join(["seq_reward", "seq_final_reward", "score", *(name for name in extras if name != "score")])
        raise WrongInput(f"{key}: the reward function returns no value of this name: write one of {known}")
    values = batch.non_tensor_batch[metric]
    wrong = [value for value in values if value is not None and not isinstance(value, Real | np.bool_)]
    if wrong:
        raise WrongInput(f"{key}: must be a number for every response, but the reward function returned {wrong[0]!r}")
    return np.array([np.nan if value is None else value for value in values], dtype=np.float64)


def varied_groups(values: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """Mark the rows, (B,) bool, whose prompt has responses that differ in the metric, or only one response.

    The paper asks for a standard deviation above 0. Comparing minimum and maximum is equivalent, and exact: in floating
    point the standard deviation of three times 0.1 is not 0. NaN is ignored.

    Source: DAPO (arXiv:2503.14476), equation 11.
    """
    _, group, size = np.unique(uids.astype(str), return_inverse=True, return_counts=True)
    low = np.full(len(size), np.inf)
    high = np.full(len(size), -np.inf)
    known = ~np.isnan(values)
    np.minimum.at(low, group[known], values[known])
    np.maximum.at(high, group[known], values[known])
    return ((high > low) | (size == 1))[group]


class Draws:
    """Counts the drawn and the kept prompts of a step, and raises an error when the step cannot be filled.

    Args: ``wanted`` is the number of prompts of a step; ``data_batches`` is the number of draws in one epoch.
    """

    def __init__(self, groups: "FilterGroupsConfig", step: int, wanted: int, data_batches: int) -> None:
        self.step = step
        self.metric = groups.metric
        self.limit = groups.max_num_gen_batches
        self.wanted = wanted
        self.patience = min(max(data_batches, FEWEST_FRUITLESS), MOST_FRUITLESS)
        self.batches = 0
        self.kept = 0
        self.dropped = 0
        self.responses = 0
        self.unknown = 0
        self.fruitless = 0
        self.total = 0.0

    @property
    def are_enough(self) -> bool:
        """Whether enough prompts are kept for the step."""
        return self.kept >= self.wanted

    def add(self, uids: np.ndarray, values: np.ndarray, keep: np.ndarray) -> None:
        """Count a draw, given the uid and the metric of each row and whether it is kept, all (B,).

        Raises: WrongInput when the step is not full, and the limit on draws is reached or too many draws in a row
            kept no prompt.
        """
        known = values[~np.isnan(values)]
        num_prompts = len(set(uids))
        num_kept = len(set(uids[keep]))
        self.batches += 1
        self.kept += num_kept
        self.fruitless = 0 if num_kept else self.fruitless + 1
        self.dropped += num_prompts - num_kept
        self.responses += len(known)
        self.unknown += len(values) - len(known)
        self.total += float(known.sum())
        logger.info("step %d: %d of %d prompts kept in %d draws", self.step, self.kept, self.wanted, self.batches)
        at_limit = self.limit > 0 and self.batches >= self.limit
        if not self.are_enough and (at_limit or self.fruitless >= self.patience):
            raise WrongInput(self._advice(at_limit))

    def _advice(self, at_limit: bool) -> str:
        limit = f"algorithm.filter_groups.max_num_gen_batches={self.limit}"
        limit += "" if at_limit else f": nothing was kept in {self.fruitless} draws in a row"
        found = f"{self.batches} draws kept {self.kept} prompts of {self.kept + self.dropped}"
        unknown = f", {self.unknown} responses have none" if self.unknown else ""
        mean = f"mean of all: {self.total / max(self.responses, 1):.4g}{unknown}"
        more = "raise it or write 0 for no limit, raise " if at_limit else "raise "
        return (
            f"{limit}: {found}, a step needs data.train_batch_size={self.wanted}; the responses of each other "
            f"prompt all have the same {self.metric!r} ({mean}), the data may be too difficult or too easy: {more}"
            "data.gen_batch_size or actor_rollout_ref.rollout.n, or lower data.train_batch_size"
        )

    def metrics(self) -> dict[str, float]:
        """Return the metrics of a full step."""
        return {
            "train/num_gen_batches": self.batches,
            "train/num_prompts_drawn": self.kept + self.dropped,
            "train/num_prompts_dropped": self.dropped,
            "train/num_prompts_surplus": self.kept - self.wanted,
            "train/filter_metric/mean": self.total / max(self.responses, 1),
            "train/filter_metric/num_unknown": self.unknown,
        }
