"""The default manager: one call of the scorer per response."""

from verl.workers.rewards.abstract import AbstractRewardManager, register
from verl.workers.rewards.scoring import RawScore, Sample, Score, score_each


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_source=, solution_str=, ground_truth=, extra_info=)`` for each response."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score one sample after the other."""
        return score_each(samples, self._score, self.limits)

    def _score(self, sample: Sample) -> RawScore:
        return self.compute_score(
            data_source=sample.data_source,
            solution_str=sample.response,
            ground_truth=sample.ground_truth,
            extra_info=sample.extra_info,
        )
