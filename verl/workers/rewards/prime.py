"""A manager for scorers that are slow or may hang: it runs each call in a subprocess with a deadline."""

from transformers import PreTrainedTokenizerBase

from verl.utils.process_pool import DeadlineExceeded, DeadlinePool, ScorerFailed
from verl.workers.rewards.abstract import AbstractRewardManager, register
from verl.workers.rewards.scoring import RawScore, RawScorer, Sample, Score, failed, settle, timed_out
from verl.workers.rewards.signature import SCORER_CALLS


@register("prime")
class PrimeRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_source, completion, ground_truth, extra_info)`` in parallel processes.

    It kills a process whose call exceeds the time limit, along with the children of the process. It writes the scores
    to ``batch["acc"]`` too, and drops the extras of the scorer.

    Args:
        num_processes: the most processes at once; a machine with few cores uses fewer.
    """

    scorer_call = SCORER_CALLS["prime"]
    writes_acc = True

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

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score the samples in parallel."""
        calls = [(s.data_source, s.response, s.ground_truth, s.extra_info) for s in samples]
        results = self.pool.map(calls, self.limits.timeout_s, self.limits.batch_timeout_s)
        return [self._score(result, sample) for result, sample in zip(results, samples, strict=True)]

    def _score(self, result: RawScore | ScorerFailed | DeadlineExceeded, sample: Sample) -> Score:
        if isinstance(result, ScorerFailed):
            return failed(sample, "raised", f"the scorer raised {result.error}", self.limits, result.trace)
        if isinstance(result, DeadlineExceeded):
            return timed_out(sample, self.limits, result.of_batch)
        score = settle(result, sample, self.limits)
        score.extras = {}
        return score
