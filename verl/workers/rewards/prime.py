"""Scorers that are slow or may hang, in processes of their own with a deadline each."""

from typing import TYPE_CHECKING, Any

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.utils.process_pool import DeadlineExceeded, DeadlinePool, ScorerFailed
from verl.workers.rewards.abstract import AbstractRewardManager, RawScorer
from verl.workers.rewards.registry import register
from verl.workers.rewards.scoring import Sample, Score, batch_timeout_text, failed, settle, timeout_text

if TYPE_CHECKING:
    from verl.protocol import DataProto


@register("prime")
class PrimeRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_source, completion, ground_truth, extra_info)`` in parallel processes.

    A process whose call does not end in time is killed, and with it what it has started. The scores are written to
    ``batch["acc"]`` too; there are no extras of the scorer.

    Args:
        num_processes: at most this many at once; fewer on a machine with few cores.
    """

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

    def __call__(self, data: "DataProto", return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score ``data``; see ``AbstractRewardManager``."""
        return self.score_batch(data, return_dict, self._score_all, writes_acc=True)

    def verify(self, data: "DataProto") -> list[float]:
        """Return the score of each response."""
        return [score.value for score in self.score_samples(data, self._score_all)[1]]

    def _score_all(self, samples: list[Sample]) -> list[Score]:
        calls = [(s.data_source, s.response, s.ground_truth, s.extra_info) for s in samples]
        results = self.pool.map(calls, self.limits.timeout_s, self.limits.batch_timeout_s)
        return [self._score(result, sample) for result, sample in zip(results, samples, strict=True)]

    def _score(self, result: Any, sample: Sample) -> Score:
        if isinstance(result, ScorerFailed):
            return failed(sample, "raised", f"the scorer raised {result.error}", self.limits, result.trace)
        if isinstance(result, DeadlineExceeded):
            text = batch_timeout_text(self.limits) if result.of_batch else timeout_text(self.limits)
            return failed(sample, "timed out", text, self.limits)
        score = settle(result, sample, self.limits)
        score.extras = {}
        return score

    @classmethod
    def call_scorer_example(cls, scorer: RawScorer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments as this manager passes them."""
        return ("", "", "", {}), {}
