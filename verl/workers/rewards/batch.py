"""A manager that calls the scorer once for the whole batch."""

import traceback
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.utils.time_limit import TimeLimitExceeded, time_limit
from verl.workers.rewards.abstract import AbstractRewardManager, register
from verl.workers.rewards.scoring import RawScorer, Sample, Score, failed, raised_text, settle, timed_out
from verl.workers.rewards.signature import SCORER_CALLS


@register("batch")
class BatchRewardManager(AbstractRewardManager):
    """Calls ``compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs)`` once.

    It writes the scores to ``batch["acc"]`` too.
    """

    scorer_call = SCORER_CALLS["batch"]
    writes_acc = True

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

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score all samples; if the call fails, all of them fail."""

        def all_failed(kind: str, text: str, trace: str = "") -> list[Score]:
            return [failed(sample, kind, text, self.limits, trace) for sample in samples]

        try:
            with time_limit(self.limits.batch_timeout_s):
                results = self.compute_score(
                    data_sources=[sample.data_source for sample in samples],
                    solution_strs=[sample.response for sample in samples],
                    ground_truths=[sample.ground_truth for sample in samples],
                    extra_infos=[sample.extra_info for sample in samples],
                    **self.reward_kwargs,
                )
        except TimeLimitExceeded:
            trace = traceback.format_exc()
            return [timed_out(sample, self.limits, of_batch=True, trace=trace) for sample in samples]
        except (Exception, SystemExit) as error:  # user code may raise anything
            return all_failed("raised", raised_text(error), traceback.format_exc())
        count = len(results) if hasattr(results, "__len__") and not isinstance(results, str | dict) else None
        if count != len(samples):
            got = type(results).__name__ if count is None else f"{count} scores"
            return all_failed("invalid", f"the scorer must return {len(samples)} scores, it returned {got}")
        return [settle(result, sample, self.limits) for result, sample in zip(results, samples, strict=True)]
