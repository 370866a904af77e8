"""Reward managers: the base class, the registry, and the managers ``naive``, ``dapo``, ``batch`` and ``prime``."""

import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from verl.errors import RewardError, WrongInput, WrongSetting
from verl.utils.import_utils import load_extern_type
from verl.utils.process.pool import DeadlinePool, IsolatedFunction, ProcessStartError
from verl.utils.process.time_limit import TimeLimitExceeded, UserCodeFailed, call_within
from verl.utils.reward_score import default_compute_score
from verl.utils.torch_functional import at_last_sampled
from verl.workers.rewards import scoring
from verl.workers.rewards.scoring import RawScore, RawScorer, RewardOutput, Sample, Score, ScoringLimits
from verl.workers.rewards.signature import SCORER_CALLS, Example, ScorerCall, class_in_file

if TYPE_CHECKING:
    from verl.protocol import DataProto

ScoreSamples = Callable[[list[Sample]], list[Score]]
ToRewards = Callable[[list[Sample], list[Score]], list[float]]


class AbstractRewardManager:
    """Score a batch of prompts and responses; a subclass defines ``score``, or all of ``__call__``.

    Args:
        tokenizer: decodes prompts and responses.
        num_examine: number of samples of each data source to log per batch.
        compute_score: the scorer; ``scorer_call`` says how the manager calls it.
        reward_fn_key: column that holds the data source.

    Raises: TypeError for a subclass that defines neither method, ValueError for unknown arguments.
    """

    limits = ScoringLimits()
    """Time limits and the treatment of failures; ``load_reward_manager`` sets those of the configuration."""
    is_of_config = False
    """Whether ``load_reward_manager`` made it, so that another process can make the same from the configuration."""
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
        cls = type(self)
        if cls.score is AbstractRewardManager.score and cls.__call__ is AbstractRewardManager.__call__:
            raise TypeError(f"reward manager {cls.__name__} must define score(samples), or __call__(data, return_dict)")
        if kwargs:
            raise WrongInput(
                f"reward_model.reward_kwargs holds {sorted(kwargs)}, which {cls.__name__} does not take: remove them"
            )
        self.tokenizer = tokenizer
        self.num_examine = num_examine
        self.compute_score: RawScorer = default_compute_score if compute_score is None else compute_score
        self.reward_fn_key = reward_fn_key
        self._has_shown_a_failure = False
        self._known_extras: scoring.Extras = {}  # name -> its value for a response that could not be scored

    def __call__(self, data: "DataProto", return_dict: bool = False) -> RewardOutput:
        """Score ``data``; a batch that already holds ``rm_scores`` keeps them.

        Returns: scores (B, R), zero except at the last sampled token of each response; or, with ``return_dict``, a dict
            of them as ``reward_tensor`` and of the scorer's extras as ``reward_extra_info``, a dict of lists of length
            B.
        """
        return self.score_batch(data, return_dict, self.score, self.rewards, self.writes_acc)

    @classmethod
    def call_scorer_example(cls, scorer: RawScorer) -> Example:
        """Return arguments in the form that the manager passes them, to check the signature of a scorer."""
        return cls.scorer_call.example()

    def verify(self, data: "DataProto") -> list[float]:
        """Return the score of each response."""
        return [score.value for score in self.score_samples(data, self.score)[1]]

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score samples; a sample that cannot be scored gets a ``failure``."""
        raise NotImplementedError(f"the reward manager {type(self).__name__} defines __call__ and no score(samples)")

    def rewards(self, samples: list[Sample], scores: list[Score]) -> list[float]:
        """Return the values of the tensor; may add extras to the scores."""
        return [score.value for score in scores]

    # ---- for subclasses that define ``__call__``

    def score_batch(
        self,
        data: "DataProto",
        return_dict: bool,
        score: ScoreSamples,
        to_rewards: ToRewards | None = None,
        writes_acc: bool = False,
    ) -> RewardOutput:
        """Score a batch like ``__call__``, with given functions instead of ``score`` and ``rewards``."""
        given = scoring.given_scores(data, return_dict)
        if given is not None:
            self._check_given(data)
            return given
        samples, scores = self.score_samples(data, score)
        self._give_lowest(samples, scores)
        scoring.log_samples(samples, scores, self.num_examine)
        assert data.batch is not None
        values = [each.value for each in scores]
        if writes_acc:
            data.batch["acc"] = torch.tensor(values, dtype=torch.float32, device=data.batch["prompts"].device)
        rewards = values if to_rewards is None else to_rewards(samples, scores)
        mask = scoring.sampled_mask(data).cpu()
        reward = at_last_sampled(torch.tensor(rewards, dtype=torch.float32), mask)
        if not return_dict:
            return reward
        return {"reward_tensor": reward, "reward_extra_info": scoring.gather_extras(scores, self._known_extras)}

    def _give_lowest(self, samples: list[Sample], scores: list[Score]) -> None:
        """Give failures without a stated score the lowest score of their data source in the batch."""
        if all(score.failure is None for score in scores):
            return
        sources = [sample.data_source for sample in samples]
        failed = [score.failure is not None for score in scores]
        lowest = scoring.lowest_scores(sources, [score.value for score in scores], failed)
        for source, score in zip(sources, scores, strict=True):
            if score.failure is not None and scoring.failure_score_of(self, source) is None:
                score.value = lowest[source]

    def _check_given(self, data: "DataProto") -> None:
        """Check and log scores from agent loops in the same way as scores of this manager.

        Raises: RewardError when more responses failed than ``reward_model.scoring.max_failed_ratio`` allows.
        """
        if scoring.FAILURE_COLUMN not in data.meta_info.get("reward_extra_keys", ()):
            return
        scoring.check_failed_ratio(list(data.non_tensor_batch[scoring.FAILURE_COLUMN]), self.limits)
        if self.num_examine:
            assert data.batch is not None
            values = data.batch["rm_scores"].sum(-1).tolist()
            samples = scoring.read_samples(data, self.tokenizer, self.reward_fn_key)
            scoring.log_samples(samples, [Score(value) for value in values], self.num_examine)

    def score_samples(self, data: "DataProto", score: ScoreSamples) -> tuple[list[Sample], list[Score]]:
        """Return the samples of a batch and their scores, and log failures."""
        samples = scoring.read_samples(data, self.tokenizer, self.reward_fn_key)
        scorer = scoring.describe_scorer(self.compute_score)
        try:
            scores = score(samples)
        except ProcessStartError as error:
            raise RewardError(f"the process of the scorer {scorer} cannot start: {error}") from error
        if self.limits.failure_score is None:
            for sample, each in zip(samples, scores, strict=True):
                if each.failure is not None:
                    each.value = scoring.failure_score_of(self, sample.data_source) or 0.0
        in_full = not self._has_shown_a_failure
        self._has_shown_a_failure |= scoring.report_failures(samples, scores, self.limits, in_full, scorer)
        return samples, scores

    def start_scorer(self) -> None:
        """Start the process of the scorer, if it has one, before the time limit of a response begins."""
        if isinstance(self.compute_score, IsolatedFunction):
            self.compute_score.start()


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
    """Return the registered class of that name, or the class that ``file.py:Class`` names.

    Raises: ValueError for an unknown name, or a file or class that cannot be loaded.
    """
    if in_file := class_in_file(name):
        return load_extern_type(*in_file)
    if name not in REWARD_MANAGER_REGISTRY:
        raise WrongInput(  # callers match the first words
            f"Unknown reward manager: {name}: "
            f"reward_model.reward_manager={name!r} is not one of {sorted(REWARD_MANAGER_REGISTRY)}"
        )
    return REWARD_MANAGER_REGISTRY[name]


# Managers


@register("naive")
class NaiveRewardManager(AbstractRewardManager):
    """Call ``compute_score(data_source=, solution_str=, ground_truth=, extra_info=)`` for each response."""

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score one sample after the other, within the limits for each and for all."""
        if isinstance(self.compute_score, IsolatedFunction):
            return self._score_in_process(self.compute_score, samples)
        end = time.monotonic() + self.limits.batch_timeout_s
        return [self._score_within(sample, end - time.monotonic()) for sample in samples]

    def _score_within(self, sample: Sample, left_s: float) -> Score:
        if left_s <= 0:
            return scoring.timed_out(sample, self.limits, of_batch=True)
        return scoring.settle(lambda: self._score(sample), sample, self.limits, left_s)

    def _score_in_process(self, scorer: IsolatedFunction, samples: list[Sample]) -> list[Score]:
        calls = [self._arguments(sample) for sample in samples]
        with closing(scorer.outcomes(calls, self.limits.timeout_s, self.limits.batch_timeout_s)) as outcomes:
            scores = {number: scoring.of_outcome(each, samples[number], self.limits) for number, each in outcomes}
        return [scores[number] for number in range(len(samples))]

    def _score(self, sample: Sample) -> RawScore:
        return self.compute_score(**self._arguments(sample))

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        return {
            "data_source": sample.data_source,
            "solution_str": sample.response,
            "ground_truth": sample.ground_truth,
            "extra_info": sample.extra_info,
        }


@register("dapo")
class DAPORewardManager(NaiveRewardManager):
    """Score as ``naive`` does, record the score as ``acc``, and add the soft overlong punishment.

    Source: DAPO (arXiv:2503.14476) section 3.4.

    Args:
        max_resp_len: the most tokens of a response.
        overlong_buffer_cfg: ``enable``, ``len`` (tokens before the limit over which the penalty grows),
            ``penalty_factor`` (the penalty at the limit), ``log`` (whether to return the penalty as an extra).

    Raises: WrongSetting without ``max_resp_len``, or when an enabled buffer is longer than ``max_resp_len``.
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
                raise WrongSetting("max_resp_len must be given with overlong_buffer_cfg, got None")
            if self._punishes and not 0 < overlong_buffer_cfg["len"] <= max_resp_len:
                raise WrongSetting(
                    f"overlong_buffer_cfg.len must be in [1, max_resp_len={max_resp_len}], "
                    f"got {overlong_buffer_cfg['len']}"
                )

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score one sample after the other."""
        scores = super().score(samples)
        for score in scores:
            score.extras.setdefault("acc", score.value if score.failure is None else 0.0)
        return scores

    def _arguments(self, sample: Sample) -> dict[str, Any]:
        response = sample.response.removesuffix(self.tokenizer.eos_token or "")
        return {**super()._arguments(sample), "solution_str": response}

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


@register("batch")
class BatchRewardManager(AbstractRewardManager):
    """Call ``compute_score(data_sources=, solution_strs=, ground_truths=, extra_infos=, **reward_kwargs)`` once.

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
            raise WrongInput(
                "reward_model.reward_manager=batch scores whole batches, which no built-in scorer does: set "
                "custom_reward_function.path to a file with compute_score(data_sources, solution_strs, ground_truths, "
                "extra_infos)"
            )
        super().__init__(tokenizer, num_examine, compute_score, reward_fn_key)
        self.reward_kwargs = reward_kwargs

    def score(self, samples: list[Sample]) -> list[Score]:
        """Score all samples; if the call fails, all of them fail."""
        self.start_scorer()
        try:
            results = call_within(self.limits.batch_timeout_s, lambda: self._results(samples))
        except TimeLimitExceeded:
            trace = traceback.format_exc()
            return [scoring.timed_out(sample, self.limits, of_batch=True, trace=trace) for sample in samples]
        except UserCodeFailed as error:
            kind = scoring.kind_of(error.is_unavailable)
            text = f"the scorer {error}"
            if isinstance(error.__cause__, RewardError):
                kind = "invalid"
                text = str(error.__cause__)
            return [scoring.failed(sample, kind, text, self.limits, error.trace) for sample in samples]
        return [scoring.settled(result, sample, self.limits) for result, sample in zip(results, samples, strict=True)]

    def _results(self, samples: list[Sample]) -> list[RawScore]:
        results = self.compute_score(
            data_sources=[sample.data_source for sample in samples],
            solution_strs=[sample.response for sample in samples],
            ground_truths=[sample.ground_truth for sample in samples],
            extra_infos=[sample.extra_info for sample in samples],
            **self.reward_kwargs,
        )
        count = len(results) if hasattr(results, "__len__") and not isinstance(results, str | dict) else None
        if count != len(samples):
            got = type(results).__name__ if count is None else f"{count} scores"
            raise RewardError(f"the scorer must return {len(samples)} scores, it returned {got}")
        return list(results)


ISOLATING: tuple[type[AbstractRewardManager], ...] = (NaiveRewardManager, DAPORewardManager, BatchRewardManager)
"""The managers that call a scorer of the user in one process; ``prime`` has several, others call it in this one."""


@register("prime")
class PrimeRewardManager(AbstractRewardManager):
    """Call ``compute_score(data_source, completion, ground_truth, extra_info)`` in parallel processes.

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
        scores = [
            scoring.of_outcome(result, sample, self.limits) for result, sample in zip(results, samples, strict=True)
        ]
        for score in scores:
            score.extras = {}
        return scores
