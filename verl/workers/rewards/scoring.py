"""Samples out of a batch, scores out of the results of a scorer, and back into a tensor: shared by the managers."""

import functools
import inspect
import logging
import math
import numbers
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, SupportsFloat

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.base_config import one_line
from verl.errors import RewardError
from verl.utils.json_types import Json
from verl.utils.process.pool import DeadlineExceeded, IsolatedFunction, Outcome, ScorerFailed
from verl.utils.process.time_limit import TimeLimitExceeded, UserCodeFailed, call_within, error_text
from verl.utils.reward_score import default_compute_score, lowest_score
from verl.utils.unavailable import is_unavailable
from verl.workers.config.reward_model import ScoringConfig

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)

EXPECTED = "a scorer must return a number, a bool, a tuple that begins with one, or a dict with a number as 'score'"
LARGEST_SCORE = torch.finfo(torch.float32).max
SHOWN_CHARS = 200
SHOWN_RESPONSE_CHARS = 1000
MOST_CHARS = 600
"""The most characters of the first failure in the error that ends the run; the log has the whole text."""
_PLAIN = frozenset({float, int, bool, str, type(None)})
RAISED = "raised"
UNAVAILABLE = "unavailable"
"""Kinds of failures: the scorer raised; or it raised because it lacked a service or a part of this machine, which no
response can cause.
"""
FAILURE_COLUMN = "reward_failure"
"""Extra with the kind of the failure of each response, None if the scorer gave a score."""

RawScore = Json | SupportsFloat
"""The result of a scorer before ``read_score`` has checked it."""
RawScorer = Callable[..., Any]
GroundTruth = Json
"""The ``ground_truth`` of a row, in the form that its scorer reads."""
Extras = dict[str, Any]
"""Further values of a response, by name."""
ExtraColumns = dict[str, list[Any]]
"""The extras of a batch: name -> list of length B."""
RewardOutput = Tensor | dict[str, Tensor | ExtraColumns]
"""Scores (B, R), or a dict with ``reward_tensor`` and ``reward_extra_info``."""
ScoringLimits = ScoringConfig
"""Time limits and the treatment of failures: the keys of ``reward_model.scoring``."""


class Reason(str):
    """Kind of a failure, in the column of a batch; ``text`` says more."""

    text: str

    def __new__(cls, kind: str, text: str) -> "Reason":
        """Return the kind with its text."""
        reason = super().__new__(cls, kind)
        reason.text = text
        return reason

    def __reduce__(self) -> tuple[type["Reason"], tuple[str, str]]:
        return Reason, (str(self), self.text)


@dataclass
class Sample:
    """The arguments of a scorer for one response."""

    index: int
    data_source: str
    prompt: str
    response: str
    ground_truth: GroundTruth
    extra_info: Extras
    length: int
    """Number of valid response tokens."""

    def describe(self) -> str:
        """Name this sample in an error."""
        return f"data_source {self.data_source!r}, sample {self.index}, ground truth {_short(self.ground_truth)}"


@dataclass(frozen=True)
class Failure:
    """Why a response could not be scored."""

    kind: str
    """``raised``, ``timed out``, ``invalid`` or ``unavailable``."""
    text: str
    trace: str = ""


@dataclass
class Score:
    """A score, further values that the scorer returned, and the failure if there is no score."""

    value: float
    extras: Extras = field(default_factory=dict)
    failure: Failure | None = None


def read_samples(data: "DataProto", tokenizer: PreTrainedTokenizerBase, reward_fn_key: str) -> list[Sample]:
    """Decode all prompts and responses without padding and special tokens."""
    assert data.batch is not None
    prompt_width = data.batch["prompts"].shape[-1]
    mask = data.batch["attention_mask"].bool().cpu()
    prompts = _valid_ids(data.batch["prompts"], mask[:, :prompt_width])
    responses = _valid_ids(data.batch["responses"], mask[:, prompt_width:])
    texts = tokenizer.batch_decode([*prompts, *responses], skip_special_tokens=True)
    columns = data.non_tensor_batch
    none = [None] * len(prompts)
    return [
        Sample(
            index=i,
            data_source=columns[reward_fn_key][i],
            prompt=texts[i],
            response=texts[len(prompts) + i],
            ground_truth=(columns["reward_model"][i] or {}).get("ground_truth"),
            extra_info={
                **(columns.get("extra_info", none)[i] or {}),
                "num_turns": columns.get("__num_turns__", none)[i],
                "rollout_reward_scores": columns.get("reward_scores", [{}] * len(prompts))[i],
            },
            length=len(responses[i]),
        )
        for i in range(len(prompts))
    ]


# ---- one response


def read_score(result: RawScore, sample: Sample) -> Score:
    """Read the score out of the result of a scorer.

    Raises: RewardError naming the sample if the result holds no score.
    """
    extras: Extras = {}
    value = result
    if isinstance(result, dict):
        if "score" not in result:
            wrong = f"a dict without 'score': {_short(result)}"
            raise RewardError(f"{sample.describe()}: the scorer returned {wrong}; {EXPECTED}")
        value = result["score"]
        extras = {k: v for k, v in result.items() if k != "score"}
    elif isinstance(result, tuple) and result:
        value = result[0]
    if isinstance(value, Tensor | np.ndarray | np.generic) and math.prod(value.shape) == 1:
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise RewardError(f"{sample.describe()}: the scorer returned {_short(result)}; {EXPECTED}")
    if not abs(_float(value)) <= LARGEST_SCORE:
        wrong = "not finite" if isinstance(value, float) and not math.isfinite(value) else "too large for a float32"
        raise RewardError(f"{sample.describe()}: the scorer returned {_short(result)}, which is {wrong}; {EXPECTED}")
    for name, extra in extras.items():
        if isinstance(extra, int) and math.isinf(_float(extra)):
            raise RewardError(
                f"{sample.describe()}: the scorer returned an extra {name!r} beyond the range of a float: leave it "
                "out, or return a smaller number"
            )
    return Score(float(value), extras)


def _float(value: SupportsFloat) -> float:
    """Return a number as a float, infinity if it is too large for one."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def call_scorer(call: Callable[[], RawScore], sample: Sample, timeout_s: float) -> Score:
    """Score one sample.

    Raises: RewardError naming the sample when the scorer raises or returns no score; TimeLimitExceeded.
    """
    try:
        return call_within(timeout_s, lambda: read_score(call(), sample))
    except UserCodeFailed as error:
        if isinstance(error.__cause__, RewardError):
            raise error.__cause__ from None
        raise RewardError(f"{sample.describe()}: the scorer {error}") from error


def settle(call: Callable[[], RawScore], sample: Sample, limits: ScoringLimits, left_s: float) -> Score:
    """Score one sample; anything but a returned score counts as a failure.

    Args: ``left_s`` is the rest of the time for the batch.
    """
    try:
        return call_within(min(limits.timeout_s, left_s), lambda: read_score(call(), sample))
    except TimeLimitExceeded:
        return timed_out(sample, limits, left_s < limits.timeout_s, traceback.format_exc())
    except UserCodeFailed as error:
        if isinstance(error.__cause__, RewardError):
            return _invalid(error.__cause__, limits)
        return failed(sample, kind_of(error.is_unavailable), f"the scorer {error}", limits, error.trace)


def kind_of(is_unavailable: bool) -> str:
    """Return the kind of the failure of a scorer that raised."""
    return UNAVAILABLE if is_unavailable else RAISED


def settled(result: RawScore, sample: Sample, limits: ScoringLimits) -> Score:
    """Read the score from a scorer's result, like ``settle``; the result may be the exception that it raised."""
    if isinstance(result, Exception) and is_unavailable(result):
        return failed(sample, UNAVAILABLE, f"the scorer returned {error_text(result)}", limits)
    if not _is_plain(result):
        return settle(lambda: result, sample, limits, limits.timeout_s)
    try:
        return read_score(result, sample)
    except RewardError as error:
        return _invalid(error, limits)


def _is_plain(result: RawScore) -> bool:
    """Whether reading a result runs no code of the user, so that it needs no time limit, which takes 13 us."""
    values = result.values() if type(result) is dict else (result,)
    return all(type(value) in _PLAIN for value in values)


def _invalid(error: RewardError, limits: ScoringLimits) -> Score:
    return Score(limits.failure_score or 0.0, {}, Failure("invalid", str(error)))


def of_outcome(outcome: Outcome, sample: Sample, limits: ScoringLimits) -> Score:
    """Return the score of a call in a process."""
    if isinstance(outcome, ScorerFailed):
        text = f"the scorer {outcome.error}"
        return failed(sample, kind_of(outcome.is_unavailable), text, limits, outcome.trace)
    if isinstance(outcome, DeadlineExceeded):
        return timed_out(sample, limits, outcome.of_batch)
    return settled(outcome, sample, limits)


def failed(sample: Sample, kind: str, text: str, limits: ScoringLimits, trace: str = "") -> Score:
    """Return the score of a response that could not be scored."""
    return Score(limits.failure_score or 0.0, {}, Failure(kind, f"{sample.describe()}: {text}", trace))


def timed_out(sample: Sample, limits: ScoringLimits, of_batch: bool, trace: str = "") -> Score:
    """Return the score of a response that took too long, or whose batch did."""
    text = f"the scorer did not end within reward_model.scoring.timeout_s={limits.timeout_s:g}"
    if of_batch:
        text = f"scoring did not end within reward_model.scoring.batch_timeout_s={limits.batch_timeout_s:g}"
    return failed(sample, "timed out", text, limits, trace)


# ---- the whole batch


def reason_of(score: "Score") -> Reason | None:
    """Return why a response could not be scored; None if it was."""
    return None if score.failure is None else Reason(score.failure.kind, one_line(score.failure.text, MOST_CHARS))


def exceeds(failed: int, count: int, limits: ScoringLimits) -> bool:
    """Return whether more of a batch failed than ``reward_model.scoring.max_failed_ratio`` allows."""
    return limits.max_failed_ratio is not None and failed > limits.max_failed_ratio * count


def report_failures(
    samples: Sequence[Sample], scores: Sequence[Score], limits: ScoringLimits, in_full: bool, scorer: str
) -> bool:
    """Log the number of failures and, with ``in_full``, the first one; return whether there is a failure.

    Args: ``scorer`` is the name of the scorer, with its file if the user gave one.

    Raises: RewardError when the failures exceed ``reward_model.scoring.max_failed_ratio`` of the batch.
    """
    failures = [(sample, score.failure) for sample, score in zip(samples, scores, strict=True) if score.failure]
    if not failures:
        return False
    sample, first = failures[0]
    too_many = exceeds(len(failures), len(samples), limits)
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(each.kind for _, each in failures).items())
    share = f"{len(failures)} of {len(samples)} responses could not be scored"
    logger.warning("%s (%s) and get %s", share, counts, describe_failure_score(limits))
    if in_full or too_many:
        level = logging.ERROR if too_many else logging.WARNING  # with too many the run ends
        response = _short(sample.response, SHOWN_RESPONSE_CHARS)
        trace = f"\n[trace]\n{first.trace.rstrip()}" if first.trace else ""
        shown = (first.text, scorer, response, trace)
        logger.log(level, "the first response that could not be scored: %s\n[scorer] %s\n[response] %s%s", *shown)
    if too_many:
        limit = f"reward_model.scoring.max_failed_ratio={limits.max_failed_ratio:g}"
        raise RewardError(
            f"{one_line(first.text, MOST_CHARS)} ({share}, more than {limit}). Correct the scorer, or raise this limit"
        )
    return True


def failure_score_of(reward_fn: Callable[..., RewardOutput], data_source: str) -> float | None:
    """Return the score of a response that a reward function cannot score: the written one, else the lowest that its
    scorer states; None if neither is there.

    A function states it in its attribute ``lowest_score``, the built-in scorers in ``LOWEST_SCORES``.
    """
    limits: ScoringLimits = getattr(reward_fn, "limits", ScoringLimits())
    scorer: RawScorer = getattr(reward_fn, "compute_score", None) or reward_fn
    return stated_failure_score(limits, scorer, data_source)


def stated_failure_score(limits: ScoringLimits, scorer: RawScorer, data_source: str) -> float | None:
    """Return the score of failures, as ``failure_score_of`` does, for a scorer."""
    if limits.failure_score is not None:
        return limits.failure_score
    inner = _inner(scorer)
    if inner is default_compute_score:
        return lowest_score(data_source)
    stated = getattr(inner, "lowest_score", None)
    return None if stated is None else float(stated)


def lowest_scores(sources: Sequence[str], values: Sequence[float], failed: Sequence[bool]) -> dict[str, float]:
    """Return for each data source the smaller of 0 and the lowest score of a response that did not fail."""
    lowest = dict.fromkeys(sources, 0.0)
    for source, value, is_failure in zip(sources, values, failed, strict=True):
        if not is_failure:
            lowest[source] = min(lowest[source], value)
    return lowest


def describe_failure_score(limits: ScoringLimits) -> str:
    """Name the score of failures in a message."""
    if limits.failure_score is None:
        return "the lowest score of their data source (reward_model.scoring.failure_score=null)"
    return f"reward_model.scoring.failure_score={limits.failure_score:g}"


def _inner(scorer: RawScorer) -> RawScorer | None:
    inner = scorer.local if isinstance(scorer, IsolatedFunction) else scorer
    return inner.func if isinstance(inner, functools.partial) else inner


def describe_scorer(scorer: RawScorer) -> str:
    """Return the name of a scorer, with its file."""
    inner = _inner(scorer)
    name = getattr(inner, "__qualname__", type(inner).__qualname__)
    code = getattr(inner if inspect.isfunction(inner) else type(inner).__call__, "__code__", None)
    return f"{name} of {code.co_filename}" if code else name


def sampled_mask(data: "DataProto") -> Tensor:
    """Return ``response_mask`` (B, R) of a batch; one without it has single turns, where every token is sampled."""
    assert data.batch is not None
    if "response_mask" in data.batch.keys():
        mask: Tensor = data.batch["response_mask"]
        return mask
    width = data.batch["responses"].shape[-1]
    if "attention_mask" not in data.batch.keys():
        return torch.ones(len(data), width, dtype=torch.long)
    attended: Tensor = data.batch["attention_mask"][:, -width:]
    return attended


def gather_extras(scores: Sequence[Score], known: Extras) -> ExtraColumns:
    """Collect extras into lists of length B, and add ``reward_failure``, the kind of the failure of each response.

    An extra that a scorer left out is None. A response that could not be scored gets 0 for an extra that holds numbers,
    None for others.

    Args: ``known`` holds the extras of earlier batches with their value for a response that could not be scored, so
        that a batch of failures alone has the same columns. This function adds those of this batch.
    """
    columns: ExtraColumns = {}
    some_scored = any(score.failure is None for score in scores)
    named = dict.fromkeys(key for score in scores for key in score.extras)
    for key in named if some_scored else {**known, **named}:
        said = [score.extras.get(key) for score in scores if score.failure is None]
        if said:
            known[key] = 0.0 if all(isinstance(value, numbers.Real | np.bool_) for value in said) else None
        missing = known.get(key, 0.0)
        columns[key] = [score.extras.get(key, missing if score.failure else None) for score in scores]
    columns[FAILURE_COLUMN] = [reason_of(score) for score in scores]
    return columns


def given_scores(data: "DataProto", return_dict: bool) -> RewardOutput | None:
    """Return the scores that a reward model or an agent loop wrote to the batch; None without such scores."""
    assert data.batch is not None
    if "rm_scores" not in data.batch.keys():
        return None
    scores: Tensor = data.batch["rm_scores"]
    if not return_dict:
        return scores
    keys = data.meta_info.get("reward_extra_keys", [])
    extras = {key: list(data.non_tensor_batch[key]) for key in keys}
    return {"reward_tensor": scores, "reward_extra_info": _without_gaps(extras)}


def _without_gaps(extras: ExtraColumns) -> ExtraColumns:
    """Return extras of agent loops with 0 for the numbers of responses that could not be scored."""
    failures = extras.get(FAILURE_COLUMN)
    if failures is None or not any(failures):
        return extras
    filled: ExtraColumns = {FAILURE_COLUMN: failures}
    for name, values in extras.items():
        said = [value for value, failure in zip(values, failures, strict=True) if failure is None]
        missing = 0.0 if all(isinstance(value, numbers.Real | np.bool_) for value in said) else None
        pairs = zip(values, failures, strict=True)
        filled.setdefault(name, [missing if failure and value is None else value for value, failure in pairs])
    return filled


def check_failed_ratio(failures: Sequence[str | None], limits: ScoringLimits) -> None:
    """Check a batch that agent loops have scored, one response at a time.

    Args: ``failures`` holds the kind of the failure of each response.
    Raises: RewardError when more failed than ``reward_model.scoring.max_failed_ratio`` allows.
    """
    kinds = [kind for kind in failures if kind]
    if exceeds(len(kinds), len(failures), limits):
        counts = ", ".join(f"{count} {kind}" for kind, count in Counter(kinds).items())
        raise RewardError(
            f"{len(kinds)} of {len(failures)} responses could not be scored ({counts}), more than "
            f"reward_model.scoring.max_failed_ratio={limits.max_failed_ratio:g}: the log of the agent loop workers has "
            "the first of them. Correct the scorer, or raise this limit"
        )


def log_samples(samples: Sequence[Sample], scores: Sequence[Score], num_examine: int) -> None:
    """Log the first samples of each data source."""
    shown: Counter[str] = Counter()
    for sample, score in zip(samples, scores, strict=True):
        if shown[sample.data_source] < num_examine:
            shown[sample.data_source] += 1
            shown_fields = (sample.data_source, sample.prompt, sample.response, sample.ground_truth, score.value)
            text = "[data_source] %s\n[prompt] %s\n[response] %s\n[ground_truth] %s\n[score] %s %s"
            logger.info(text, *shown_fields, score.extras or "")


def _valid_ids(ids: Tensor, mask: Tensor) -> list[list[int]]:
    return [part.tolist() for part in torch.split(ids.cpu()[mask], mask.sum(-1).tolist())]


def _short(value: RawScore | GroundTruth, limit: int = SHOWN_CHARS) -> str:
    try:
        text = repr(value)
    except Exception as error:  # the text of a user's class may fail, and so may an integer with too many digits
        return f"a {type(value).__name__}, whose repr raises {type(error).__name__}"
    return text if len(text) <= limit else text[:limit] + "..."
