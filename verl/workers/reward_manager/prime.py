"""Scorers that are slow or may hang, in processes of their own with a deadline each."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.utils.process_pool import DeadlineExceeded, DeadlinePool, ScorerFailed
from verl.workers.reward_manager.abstract import AbstractRewardManager, RawScorer
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.scoring import (
    RewardError,
    Sample,
    Score,
    given_scores,
    log_samples,
    place_scores,
    read_samples,
    read_score,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto


@register("prime")
class PrimeRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_source, completion, ground_truth, extra_info)`` in parallel processes.

    A response whose scorer does not end within its deadline gets 0. The scores are written to ``batch["acc"]`` too.

    Args:
        num_processes: at most this many at once; fewer on a machine with few cores.
        timeout_s: deadline of one response.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawScorer | None = None,
        reward_fn_key: str = "data_source",
        num_processes: int = 64,
        timeout_s: float = 300.0,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.pool = DeadlinePool(self.compute_score, num_processes, timeout_s)

    def __call__(self, data: "DataProto", return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score ``data``; see ``AbstractRewardManager``. There are no extras."""
        given = given_scores(data, return_dict)
        if given is not None:
            return given
        samples = read_samples(data, self.tokenizer, self.reward_fn_key)
        scores = self._score(samples)
        values = [score.value for score in scores]
        log_samples(samples, scores, self.num_examine)
        data.batch["acc"] = torch.tensor(values, dtype=torch.float32, device=data.batch["prompts"].device)
        reward = place_scores(values, samples, data.batch["responses"])
        return {"reward_tensor": reward, "reward_extra_info": {}} if return_dict else reward

    def verify(self, data: "DataProto") -> list[float]:
        """Return the score of each response."""
        return [score.value for score in self._score(read_samples(data, self.tokenizer, self.reward_fn_key))]

    def _score(self, samples: list[Sample]) -> list[Score]:
        results = self.pool.map([(s.data_source, s.response, s.ground_truth, s.extra_info) for s in samples])
        scores = []
        for result, sample in zip(results, samples, strict=True):
            if isinstance(result, ScorerFailed):
                raise RewardError(f"{sample.describe()}: the scorer raised {result.error}")
            scores.append(Score(0.0, {}) if isinstance(result, DeadlineExceeded) else read_score(result, sample))
        return scores

    @classmethod
    def call_scorer_example(cls, scorer: RawScorer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments as this manager passes them."""
        return ("", "", "", {}), {}
