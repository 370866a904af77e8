"""The default manager: one call of the scorer per response."""

from typing import TYPE_CHECKING

from verl.workers.rewards.abstract import AbstractRewardManager, register
from verl.workers.rewards.scoring import RawScore, RewardOutput, Sample, Score, score_each

if TYPE_CHECKING:
    from verl.protocol import DataProto


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_source=, solution_str=, ground_truth=, extra_info=)`` for each response."""

    def __call__(self, data: "DataProto", return_dict: bool = False) -> RewardOutput:
        """Score ``data``; see ``AbstractRewardManager``."""
        return self.score_batch(data, return_dict, self._score_each)

    def _score_each(self, samples: list[Sample]) -> list[Score]:
        return score_each(samples, self._score, self.limits)

    def _score(self, sample: Sample) -> RawScore:
        return self.compute_score(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
