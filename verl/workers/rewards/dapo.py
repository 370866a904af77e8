"""A manager with one call per response and a penalty for responses that come near the length limit."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from verl.workers.rewards.abstract import register
from verl.workers.rewards.naive import NaiveRewardManager
from verl.workers.rewards.scoring import RawScore, RawScorer, Sample, Score


class OverlongBufferError(ValueError, AssertionError):
    """The overlong buffer does not fit the response length."""


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Scores as ``naive`` does, records the score as ``acc``, and adds the soft overlong punishment.

    Source: DAPO (arXiv:2503.14476) section 3.4.

    Args:
        max_resp_len: the most tokens of a response.
        overlong_buffer_cfg: ``enable``, ``len`` (tokens before the limit over which the penalty grows),
            ``penalty_factor`` (the penalty at the limit), ``log`` (whether to return the penalty as an extra).

    Raises: OverlongBufferError without ``max_resp_len``, or when an enabled buffer is longer than ``max_resp_len``.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawScorer | None = None,
        reward_fn_key: str = "data_source",
        max_resp_len: int | None = None,
        overlong_buffer_cfg: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.overlong_buffer_cfg = overlong_buffer_cfg
        self.max_resp_len = max_resp_len
        self._punishes = overlong_buffer_cfg is not None and bool(overlong_buffer_cfg["enable"])
        if overlong_buffer_cfg is not None:
            if max_resp_len is None:
                raise OverlongBufferError("max_resp_len must be given with overlong_buffer_cfg, got None")
            if self._punishes and not 0 < overlong_buffer_cfg["len"] <= max_resp_len:
                raise OverlongBufferError(
                    f"overlong_buffer_cfg.len must be in [1, max_resp_len={max_resp_len}], "
                    f"got {overlong_buffer_cfg['len']}"
                )

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score one sample after the other."""
        scores = super().score(samples)
        for score in scores:
            score.extras.setdefault("acc", score.value if score.failure is None else 0.0)
        return scores

    def _score(self, sample: Sample) -> RawScore:
        return super()._score(replace(sample, response=sample.response.removesuffix(self.tokenizer.eos_token or "")))

    def rewards(self, samples: list[Sample], scores: list[Score]) -> list[float]:
        """Add ``min(-(length - (max_resp_len - len)) / len * penalty_factor, 0)`` to each score."""
        if not self._punishes:
            return super().rewards(samples, scores)
        assert self.overlong_buffer_cfg is not None and self.max_resp_len is not None
        buffer = self.overlong_buffer_cfg["len"]
        rewards = []
        for sample, score in zip(samples, scores, strict=True):
            exceeded = sample.length - (self.max_resp_len - buffer)
            penalty = min(-exceeded / buffer * self.overlong_buffer_cfg["penalty_factor"], 0.0)
            score.extras.setdefault("score", score.value)  # without the penalty, for the filter of DAPO
            if self.overlong_buffer_cfg.get("log"):
                score.extras |= {"overlong_reward": penalty, "overlong": penalty < 0}
            rewards.append(score.value + penalty)
        return rewards
