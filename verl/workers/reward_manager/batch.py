"""One call of the scorer for the whole batch."""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.workers.reward_manager.abstract import AbstractRewardManager, RawScorer
from verl.workers.reward_manager.registry import register
from verl.workers.reward_manager.scoring import (
    RewardError,
    Sample,
    Score,
    gather_extras,
    given_scores,
    log_samples,
    place_scores,
    read_samples,
    read_score,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto


@register("batch")
class BatchRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs)`` once.

    The scores are written to ``batch["acc"]`` too.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawScorer | None = None,
        reward_fn_key: str = "data_source",
        **reward_kwargs: Any,
    ) -> None:
        if compute_score is None:
            raise ValueError(
                "reward_model.reward_manager=batch scores whole batches, which no built-in scorer does: set "
                "custom_reward_function.path to a file with compute_score(data_sources, solution_strs, ground_truths, "
                "extra_infos)"
            )
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = reward_kwargs

    def __call__(self, data: "DataProto", return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score ``data``; see ``AbstractRewardManager``."""
        given = given_scores(data, return_dict)
        if given is not None:
            return given
        samples = read_samples(data, self.tokenizer, self.reward_fn_key)
        scores = self._score(samples)
        values = [score.value for score in scores]
        log_samples(samples, scores, self.num_examine)
        reward = place_scores(values, samples, data.batch["responses"])
        data.batch["acc"] = torch.tensor(values, dtype=torch.float32, device=data.batch["prompts"].device)
        return {"reward_tensor": reward, "reward_extra_info": gather_extras(scores)} if return_dict else reward

    def verify(self, data: "DataProto") -> list[float]:
        """Return the score of each response."""
        return [score.value for score in self._score(read_samples(data, self.tokenizer, self.reward_fn_key))]

    def _score(self, samples: list[Sample]) -> list[Score]:
        sources = sorted({sample.data_source for sample in samples})
        try:
            results = self.compute_score(
                data_sources=[sample.data_source for sample in samples],
                solution_strs=[sample.response for sample in samples],
                ground_truths=[sample.ground_truth for sample in samples],
                extra_infos=[sample.extra_info for sample in samples],
                **self.reward_kwargs,
            )
        except Exception as error:  # user code raises anything; it goes on with the data named
            raise RewardError(f"data sources {sources}: the scorer raised {type(error).__name__}: {error}") from error
        count = len(results) if hasattr(results, "__len__") and not isinstance(results, str | dict) else None
        if count != len(samples):
            got = type(results).__name__ if count is None else f"{count} scores"
            raise RewardError(
                f"data sources {sources}: the scorer must return {len(samples)} scores, it returned {got}"
            )
        return [read_score(result, sample) for result, sample in zip(results, samples, strict=True)]

    @classmethod
    def call_scorer_example(cls, scorer: RawScorer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments as this manager passes them."""
        return (), {"data_sources": [], "solution_strs": [], "ground_truths": [], "extra_infos": []}
