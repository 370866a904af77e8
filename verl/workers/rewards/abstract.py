"""What every reward manager does."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.workers.rewards.scoring import (
    Sample,
    Score,
    ScoringLimits,
    gather_extras,
    given_scores,
    log_samples,
    place_scores,
    read_samples,
    report_failures,
)

if TYPE_CHECKING:
    from verl.protocol import DataProto

RawScorer = Callable[..., Any]
ScoreSamples = Callable[[list[Sample]], list[Score]]


class AbstractRewardManager(ABC):
    """Scores a batch of prompts and responses.

    Args:
        tokenizer: decodes prompts and responses.
        num_examine: how many samples of each data source are logged per batch.
        compute_score: the scorer; what it is called with is up to the manager.
        reward_fn_key: column that holds the data source.
    """

    limits = ScoringLimits()
    """What a scorer may cost; ``load_reward_manager`` sets those of the configuration."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        num_examine: int,
        compute_score: RawScorer | None = None,
        reward_fn_key: str = "data_source",
        **kwargs: Any,
    ) -> None:
        if kwargs:
            raise ValueError(
                f"reward_model.reward_kwargs holds {sorted(kwargs)}, which {type(self).__name__} does not take"
            )
        if compute_score is None:
            from verl.utils.reward_score import default_compute_score

            compute_score = default_compute_score
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: RawScorer = compute_score
        self.reward_fn_key = reward_fn_key
        self._has_shown_a_failure = False
        self._known_extras: dict[str, Any] = {}  # name -> what stands for it where a response could not be scored

    @abstractmethod
    def __call__(self, data: "DataProto", return_dict: bool = False) -> Tensor | dict[str, Any]:
        """Score ``data``.

        Returns: scores (B, R), zero but at the last valid token of each response; or a dict of them as
        ``reward_tensor``, with what else the scorer said as ``reward_extra_info``, a dict of lists of length B.
        """

    @classmethod
    def call_scorer_example(cls, scorer: RawScorer) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return arguments as this manager passes them, by which the signature of a scorer is checked."""
        return (), {"data_source": "", "solution_str": "", "ground_truth": "", "extra_info": {}}

    # ---- for the ``__call__`` of subclasses

    def score_batch(
        self,
        data: "DataProto",
        return_dict: bool,
        score: ScoreSamples,
        to_rewards: Callable[[Sequence[Sample], Sequence[Score]], list[float]] | None = None,
        writes_acc: bool = False,
    ) -> Tensor | dict[str, Any]:
        """Score ``data`` as ``__call__`` says, unless its scores are there already.

        Args:
            score: scores samples; one that it cannot score carries a ``failure``.
            to_rewards: turns the scores into what the tensor holds, and may add extras to them.
            writes_acc: whether the scores go into ``batch["acc"]`` too.
        """
        given = given_scores(data, return_dict)
        if given is not None:
            return given
        samples, scores = self.score_samples(data, score)
        log_samples(samples, scores, self.num_examine)
        values = [each.value for each in scores]
        if writes_acc:
            data.batch["acc"] = torch.tensor(values, dtype=torch.float32, device=data.batch["prompts"].device)
        rewards = values if to_rewards is None else to_rewards(samples, scores)
        reward = place_scores(rewards, samples, data.batch["responses"])
        if not return_dict:
            return reward
        return {"reward_tensor": reward, "reward_extra_info": gather_extras(scores, self._known_extras)}

    def score_samples(self, data: "DataProto", score: ScoreSamples) -> tuple[list[Sample], list[Score]]:
        """Return what the scorer is told of each response, and what it says; failures are logged."""
        samples = read_samples(data, self.tokenizer, self.reward_fn_key)
        scores = score(samples)
        self._has_shown_a_failure |= report_failures(samples, scores, self.limits, not self._has_shown_a_failure)
        return samples, scores
