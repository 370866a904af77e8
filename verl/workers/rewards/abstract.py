"""The base class of reward managers, and their registry."""

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from verl.utils.reward_score import default_compute_score
from verl.workers.rewards import scoring
from verl.workers.rewards.scoring import RawScorer, RewardOutput, Sample, Score, ScoringLimits
from verl.workers.rewards.signature import SCORER_CALLS, ScorerCall

if TYPE_CHECKING:
    from verl.protocol import DataProto


class AbstractRewardManager:
    """Scores a batch of prompts and responses; a subclass overrides ``score``, or all of ``__call__``.

    Args:
        tokenizer: decodes prompts and responses.
        num_examine: number of samples of each data source to log per batch.
        compute_score: the scorer; ``scorer_call`` says how the manager calls it.
        reward_fn_key: column that holds the data source.
    """

    limits = ScoringLimits()
    """Time limits and the treatment of failures; ``load_reward_manager`` sets those of the configuration."""
    scorer_call: ClassVar[ScorerCall] = SCORER_CALLS["naive"]
    writes_acc: ClassVar[bool] = False
    """Whether the scores go to ``batch["acc"]`` too."""

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
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: RawScorer = default_compute_score if compute_score is None else compute_score
        self.reward_fn_key = reward_fn_key
        self._has_shown_a_failure = False
        self._known_extras: scoring.Extras = {}  # name -> its value for a response that could not be scored

    def __call__(self, data: "DataProto", return_dict: bool = False) -> RewardOutput:
        """Score ``data``; a batch that already holds ``rm_scores`` keeps them.

        Returns: scores (B, R), zero except at the last valid token of each response; or, with ``return_dict``, a dict
            of them as ``reward_tensor`` and of the scorer's extras as ``reward_extra_info``, a dict of lists of length
            B.
        """
        given = scoring.given_scores(data, return_dict)
        if given is not None:
            return given
        samples, scores = self._samples_and_scores(data)
        scoring.log_samples(samples, scores, self.num_examine)
        assert data.batch is not None
        if self.writes_acc:
            values = [score.value for score in scores]
            data.batch["acc"] = torch.tensor(values, dtype=torch.float32, device=data.batch["prompts"].device)
        reward = scoring.place_scores(self.rewards(samples, scores), samples, data.batch["responses"])
        if not return_dict:
            return reward
        return {"reward_tensor": reward, "reward_extra_info": scoring.gather_extras(scores, self._known_extras)}

    def verify(self, data: "DataProto") -> list[float]:
        """Return the score of each response."""
        return [score.value for score in self._samples_and_scores(data)[1]]

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score samples; a sample that cannot be scored gets a ``failure``."""
        raise NotImplementedError

    def rewards(self, samples: list[Sample], scores: list[Score]) -> list[float]:
        """Return the values of the tensor; may add extras to the scores."""
        return [score.value for score in scores]

    def _samples_and_scores(self, data: "DataProto") -> tuple[list[Sample], list[Score]]:
        """Return the samples of a batch and their scores, and log failures."""
        samples = scoring.read_samples(data, self.tokenizer, self.reward_fn_key)
        scores = self.score(samples)
        in_full = not self._has_shown_a_failure
        self._has_shown_a_failure |= scoring.report_failures(samples, scores, self.limits, in_full)
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
