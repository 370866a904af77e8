"""The base class of reward managers, and their registry."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from verl.workers.rewards.scoring import (
    Extras,
    RawScorer,
    RewardOutput,
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
from verl.workers.rewards.signature import SCORER_CALLS, ScorerCall

if TYPE_CHECKING:
    from verl.protocol import DataProto

ScoreSamples = Callable[[list[Sample]], list[Score]]


class AbstractRewardManager(ABC):
    """Scores a batch of prompts and responses.

    Args:
        tokenizer: decodes prompts and responses.
        num_examine: number of samples of each data source to log per batch.
        compute_score: the scorer; ``scorer_call`` says how the manager calls it.
        reward_fn_key: column that holds the data source.
    """

    limits = ScoringLimits()
    """Time limits and the treatment of failures; ``load_reward_manager`` sets those of the configuration."""
    scorer_call: ClassVar[ScorerCall] = SCORER_CALLS["naive"]

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
        self._known_extras: Extras = {}  # name -> its value for a response that could not be scored

    @abstractmethod
    def __call__(self, data: "DataProto", return_dict: bool = False) -> RewardOutput:
        """Score ``data``.

        Returns: scores (B, R), zero except at the last valid token of each response; or, with ``return_dict``, a dict
            of them as ``reward_tensor`` and of the scorer's extras as ``reward_extra_info``, a dict of lists of length
            B.
        """

    # ---- for the ``__call__`` of subclasses

    def score_batch(
        self,
        data: "DataProto",
        return_dict: bool,
        score: ScoreSamples,
        to_rewards: Callable[[Sequence[Sample], Sequence[Score]], list[float]] | None = None,
        writes_acc: bool = False,
    ) -> RewardOutput:
        """Score ``data`` for ``__call__``; a batch that already holds ``rm_scores`` keeps them.

        Args:
            score: scores samples; a sample that it cannot score gets a ``failure``.
            to_rewards: turns the scores into the values of the tensor, and may add extras to them.
            writes_acc: whether to write the scores to ``batch["acc"]`` too.
        """
        given = given_scores(data, return_dict)
        if given is not None:
            return given
        samples, scores = self.score_samples(data, score)
        log_samples(samples, scores, self.num_examine)
        values = [each.value for each in scores]
        assert data.batch is not None
        if writes_acc:
            data.batch["acc"] = torch.tensor(values, dtype=torch.float32, device=data.batch["prompts"].device)
        rewards = values if to_rewards is None else to_rewards(samples, scores)
        reward = place_scores(rewards, samples, data.batch["responses"])
        if not return_dict:
            return reward
        return {"reward_tensor": reward, "reward_extra_info": gather_extras(scores, self._known_extras)}

    def score_samples(self, data: "DataProto", score: ScoreSamples) -> tuple[list[Sample], list[Score]]:
        """Return the samples of a batch and their scores, and log failures."""
        samples = read_samples(data, self.tokenizer, self.reward_fn_key)
        scores = score(samples)
        self._has_shown_a_failure |= report_failures(samples, scores, self.limits, not self._has_shown_a_failure)
        return samples, scores


# Registry

Manager = TypeVar("Manager", bound=type[AbstractRewardManager])

REWARD_MANAGER_REGISTRY: dict[str, type[AbstractRewardManager]] = {}


def register(name: str) -> Callable[[Manager], Manager]:
    """Register the decorated class under ``name``.

    Raises: ValueError when another class has that name.
    """

    def enter(cls: Manager) -> Manager:
        known = REWARD_MANAGER_REGISTRY.get(name)
        if known is not None and (known.__module__, known.__qualname__) != (cls.__module__, cls.__qualname__):
            raise ValueError(f"reward manager {name!r} is already {known.__module__}.{known.__qualname__}")
        REWARD_MANAGER_REGISTRY[name] = cls
        return cls

    return enter


def get_reward_manager_cls(name: str) -> type[AbstractRewardManager]:
    """Return the registered class of that name.

    Raises: ValueError for an unknown name.
    """
    for built_in in SCORER_CALLS:
        importlib.import_module(f"verl.workers.rewards.{built_in}")  # registers its manager
    if name not in REWARD_MANAGER_REGISTRY:
        raise ValueError(f"reward_model.reward_manager={name!r} is not one of {sorted(REWARD_MANAGER_REGISTRY)}")
    return REWARD_MANAGER_REGISTRY[name]
