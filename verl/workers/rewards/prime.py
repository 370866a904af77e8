"""A manager for scorers that are slow or may hang: it runs each call in a subprocess with a deadline."""

from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase

from verl.utils.process_pool import DeadlineExceeded, DeadlinePool, ScorerFailed
from verl.workers.rewards.abstract import AbstractRewardManager, register
from verl.workers.rewards.scoring import (
    RawScore,
    RawScorer,
    RewardOutput,
    Sample,
    Score,
    batch_timeout_text,
    failed,
    settle,
    timeout_text,
)
from verl.workers.rewards.signature import SCORER_CALLS

if TYPE_CHECKING:
    from verl.protocol import DataProto


@register("prime")
class PrimeRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_source, completion, ground_truth, extra_info)`` in parallel processes.

    It kills a process whose call exceeds the time limit, along with the children of the process. It writes the scores
    to ``batch["acc"]`` too, and drops the extras of the scorer.

    Args:
        num_processes: the most processes at once; a machine with few cores uses fewer.
    """

    scorer_call = SCORER_CALLS["prime"]

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawScorer | None = None,
        reward_fn_key: str = "data_source",
        num_processes: int = 64,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.pool = DeadlinePool(self.compute_score, num_processes)

    def __call__(self, data: "DataProto", return_dict: bool = False) -> RewardOutput:
        """Score ``data``; see ``AbstractRewardManager``."""
        return self.score_batch(data, return_dict, self._score_all, writes_acc=True)

    def verify(self, data: "DataProto") -> list[float]:
        """Return the score of each response."""
        return [score.value for score in self.score_samples(data, self._score_all)[1]]

    def _score_all(self, samples: list[Sample]) -> list[Score]:
        calls = [(s.data_source, s.response, s.ground_truth, s.extra_info) for s in samples]
        results = self.pool.map(calls, self.limits.timeout_s, self.limits.batch_timeout_s)
        return [self._score(result, sample) for result, sample in zip(results, samples, strict=True)]

    def _score(self, result: RawScore | ScorerFailed | DeadlineExceeded, sample: Sample) -> Score:
        if isinstance(result, ScorerFailed):
            return failed(sample, "raised", f"the scorer raised {result.error}", self.limits, result.trace)
        if isinstance(result, DeadlineExceeded):
            text = batch_timeout_text(self.limits) if result.of_batch else timeout_text(self.limits)
            return failed(sample, "timed out", text, self.limits)
        score = settle(result, sample, self.limits)
        score.extras = {}
        return score
