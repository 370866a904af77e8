"""Validation: generate, score and summarise the whole validation set with the current weights."""

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from numbers import Number
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.errors import WrongInput
from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.conversations import Conversation, conversations, readable
from verl.trainer.ppo.loaders import Rows
from verl.trainer.ppo.metric_utils import failure_metrics, process_validation_metrics, without_dropped
from verl.trainer.ppo.records import Dump, dump_extras, earlier_texts, ground_truths, trace_batch
from verl.trainer.ppo.reward import ExtraColumns, RewardFn, compute_reward
from verl.trainer.run.output import log_generations
from verl.utils.json_types import Json
from verl.utils.numerics.seeding import derive_seed, prompt_uids, sampling_seeds
from verl.utils.observe.tracking import Trackers, ValidationGenerationsLogger
from verl.workers.rewards.scoring import FAILURE_COLUMN, failure_score_of, sampled_mask
from verl.workers.rollout.base import DROPPED_COLUMN, STAYS_AWAKE

T = TypeVar("T")

_warn_once = cache(logging.getLogger(__name__).warning)

PLACES = "sampling_places"
"""Meta of a batch of prompts: the numbers of the prompts from which the seeds of their samples come."""
MISSING = "missing"
"""Kind of the failure of a sample that an agent loop gave up, or in which the policy has sampled no token."""


@dataclass
class ValidationSamples:
    """The samples of one validation, one entry per response in every list."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    truths: list[Json] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    conversations: list[Conversation | None] = field(default_factory=list)
    earlier: list[list[dict[str, str]] | None] = field(default_factory=list)
    extras: ExtraColumns = field(default_factory=lambda: defaultdict(list))

    failure_scores: dict[str, float] = field(default_factory=dict)
    """Data source -> score of a failure, where the configuration or the scorer states it."""

    def add(
        self,
        batch: DataProto,
        scores: Sequence[float],
        extras: ExtraColumns,
        tokenizer: PreTrainedTokenizerBase,
        reward_fn_key: str = "data_source",
    ) -> None:
        """Add the responses of a batch with their scores and the extras of the reward function."""
        tensors = tensors_of(batch)
        num_before = len(self.scores)
        self.inputs += tokenizer.batch_decode(tensors["prompts"], skip_special_tokens=True)
        self.outputs += tokenizer.batch_decode(tensors["responses"], skip_special_tokens=True)
        self.truths += ground_truths(batch)
        self.scores += scores
        self.uids += list(batch.non_tensor_batch["uid"])
        self.sources += list(batch.non_tensor_batch.get(reward_fn_key, ["unknown"] * len(scores)))
        self.extras["reward"] += scores
        add_extras(self.extras, extras, num_before, len(scores))
        counts = without_dropped(batch).non_tensor_batch.get("__num_turns__", ())
        self.turns += [int(turns) for turns in counts]
        self.conversations += conversations(batch, tokenizer) or [None] * len(scores)
        self.earlier += earlier_texts(batch, tokenizer) or [None] * len(scores)

    def rows_by_source(self) -> dict[str, list[int]]:
        """Return the rows of each data source."""
        rows: dict[str, list[int]] = {}
        for row, source in enumerate(self.sources):
            rows.setdefault(source, []).append(row)
        return rows

    def settle_failures(self) -> None:
        """Write the score of a failure to responses that are missing or could not be scored.

        The score of a failure is the configured one, else the smaller of 0 and the data source's lowest score in this
        validation.
        """
        reasons = self.extras.get(FAILURE_COLUMN)
        if reasons is None:
            return
        for source, rows in self.rows_by_source().items():
            stated = self.failure_scores.get(source)
            columns: list[list[Any]] = [self.scores, self.extras.get("reward", []), self.extras.get("score", [])]
            for values in filter(None, columns):
                given = [values[row] for row in rows if reasons[row] is None and values[row] is not None]
                lowest = min([0.0, *given])
                for row in rows:
                    if stated is None and reasons[row] is not None:
                        values[row] = lowest
                    elif reasons[row] == MISSING:
                        values[row] = stated

    @property
    def shown(self) -> list[str]:
        """The responses for people to read: conversations with their roles."""
        pairs = zip(self.outputs, self.conversations, strict=True)
        return [readable(talk) if talk and len(talk) > 1 else output for output, talk in pairs]

    @property
    def columns(self) -> ExtraColumns:
        """The columns of a dump besides texts, truths and scores."""
        columns = dump_extras(self.extras)
        if any(self.conversations):
            columns["turns"] = self.conversations
        if any(self.earlier):
            columns["earlier_segments"] = self.earlier
        return columns

    @property
    def dumped(self) -> Dump:
        """The samples as arguments of ``dump_generations``."""
        return {
            "inputs": self.inputs,
            "outputs": self.outputs,
            "gts": self.truths,
            "scores": self.scores,
            "reward_extra_infos_dict": self.columns,
        }


def choose_samples(
    inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float], count: int
) -> list[tuple[str, str, float]]:
    """Choose the same (input, output, score) rows in every validation, whatever order they came in."""
    rows = sorted(zip(inputs, outputs, scores, strict=True), key=lambda row: row[0])
    np.random.RandomState(42).shuffle(rows)
    return rows[:count]


def show_samples(
    generations: ValidationGenerationsLogger,
    trackers: Trackers,
    samples: tuple[Sequence[str], Sequence[str], Sequence[float]],
    count: int,
    step: int,
) -> None:
    """Show ``count`` of the samples (inputs, outputs, scores) in the trackers that can."""
    if count > 0:
        log_generations(generations, trackers, choose_samples(*samples, count), step)


def collect_samples(
    loader: Iterable[Rows] | None,
    generate: Callable[[DataProto, int], DataProto],
    reward_fn: RewardFn | None,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    with_reward_model: bool = False,
    reward_fn_key: str = "data_source",
) -> ValidationSamples | None:
    """Generate and score the responses to the whole validation set.

    Args:
        generate: returns the responses to a batch of prompts, given the number of prompts before it.
        with_reward_model: whether the run has a reward model. Rows that it is to judge (``reward_model.style: model``)
            have no ground truth, and are left out.
        reward_fn_key: column of the data source.
    Returns: None if no row is left.
    Raises: ValueError when there is no validation set, or no validation reward function.
    """
    if loader is None:
        raise WrongInput("data.val_files=null: name a file, or set trainer.val_before_train=false and test_freq=-1")
    samples = ValidationSamples()
    counts: Counter[bytes] = Counter()
    num_prompts = 0
    has_uids = False
    for prompts, is_last in with_last(_prompts_of(loader, with_reward_model)):
        prompts.meta_info[STAYS_AWAKE] = not is_last  # nothing uses the devices while responses are scored by rules
        has_uids = "uid" in prompts.non_tensor_batch
        prompts.meta_info[PLACES] = number_prompts(prompts, counts, reward_fn_key)
        batch = generate(prompts, num_prompts)
        num_prompts += len(prompts)
        if reward_fn is None:
            raise ValueError("validation needs a reward function: val_reward_fn of the trainer is None")
        missing = mark_missing(batch)
        token_scores, extras = compute_reward(batch, reward_fn, validate=True)
        if missing.any():
            reasons = extras.get(FAILURE_COLUMN, [None] * len(batch))
            extras[FAILURE_COLUMN] = [MISSING if gone else r for gone, r in zip(missing, reasons, strict=True)]
        scores = token_scores.sum(-1)
        if "rm_scores" not in tensors_of(batch).keys():  # agent loops with rm_scores have traced each turn
            trace_batch(without_dropped(batch), scores[~torch.from_numpy(missing)], step, tokenizer, validate=True)
        samples.add(batch, scores.tolist(), extras, tokenizer, reward_fn_key)
    if not num_prompts:
        return None
    assert reward_fn is not None
    for source in samples.rows_by_source():
        stated = failure_score_of(reward_fn, source)
        if stated is not None:
            samples.failure_scores[source] = stated
    samples.settle_failures()
    if has_uids:
        _tell_of_merged_prompts(num_prompts, len(set(zip(samples.sources, samples.uids, strict=True))))
    return samples


def _prompts_of(loader: Iterable[Rows], with_reward_model: bool) -> Iterator[DataProto]:
    """Yield the non-empty batches of prompts, without prompts that only a reward model can score."""
    for rows in loader:
        prompts = DataProto.from_single_dict(rows)
        if with_reward_model:
            prompts = judged_by_rule(prompts)
        if len(prompts):
            yield prompts


def with_last(values: Iterable[T]) -> Iterator[tuple[T, bool]]:
    """Yield each value, and whether it is the last one; the value after it is read first."""
    pending = iter(values)
    for value in pending:
        for following in pending:
            yield value, False
            value = following
        yield value, True


def number_prompts(batch: DataProto, counts: Counter[bytes], reward_fn_key: str) -> np.ndarray:
    """Number prompts by their source, their tokens, and how often both came before: (B,) uint64.

    The seeds of their samples come from these numbers, and so do not depend on other rows or on the order of all.

    Args: ``counts`` holds how often each came in earlier batches.
    """
    tensors = tensors_of(batch)
    ids = tensors["input_ids"]
    attended = tensors["attention_mask"].bool() if "attention_mask" in tensors.keys() else torch.ones_like(ids).bool()
    sources = batch.non_tensor_batch.get(reward_fn_key, [""] * len(batch))
    numbers = []
    for source, row, mask in zip(sources, ids, attended, strict=True):
        digest = hashlib.blake2b(f"{source}/".encode() + row[mask].numpy().tobytes(), digest_size=16).digest()
        numbers.append(derive_seed(counts[digest], digest.hex()))
        counts[digest] += 1
    return np.array(numbers, dtype=np.uint64)


def judged_by_rule(batch: DataProto) -> DataProto:
    """Return the rows that ask for a rule, and not for a reward model (``reward_model.style: model``)."""
    judges = batch.non_tensor_batch.get("reward_model", [None] * len(batch))
    rows = [row for row, judge in enumerate(judges) if not isinstance(judge, Mapping) or judge.get("style") != "model"]
    return batch if len(rows) == len(batch) else batch.select_idxs(rows)


def mark_missing(batch: DataProto) -> np.ndarray:
    """Mark rows without a sampled token as failed, like rows without a trajectory; no scorer sees them.

    Returns: which rows those are, (B,) bool.
    """
    missing: np.ndarray = ~sampled_mask(batch).bool().any(-1).cpu().numpy()
    if missing.any():
        batch.non_tensor_batch[DROPPED_COLUMN] = missing
    return missing


def _tell_of_merged_prompts(before: int, after: int) -> None:
    if after < before:
        _warn_once(
            "the column 'uid' of data.val_files makes %d prompts of the %d validation prompts: rows of a data source "
            "with one uid count as samples of one prompt. Rename the column to keep them apart",
            after,
            before,
        )


def repeat_prompts(
    batch: DataProto, num_samples: int, seed: int, step: int, first_prompt: int
) -> tuple[DataProto, Tensor]:
    """Return ``num_samples`` rows per prompt and their sampling seeds; prompts get a ``uid`` if they lack one."""
    if "uid" not in batch.non_tensor_batch:
        batch.non_tensor_batch["uid"] = prompt_uids(seed, step, len(batch), "validate", first_prompt)
    places = batch.meta_info.pop(PLACES, None)
    seeds = sampling_seeds(seed, step, len(batch), num_samples, True, first_prompt, places)
    return batch.repeat(repeat_times=num_samples, interleave=True), seeds


def complete_requests(
    requests: DataProto, prompts: DataProto, seeds: Tensor, do_sample: bool, step: int, loops_score: bool
) -> None:
    """Write the seeds and the meta information of a validation to requests for responses.

    Args: ``prompts`` are those of the requests, as ``collect_samples`` gives them; ``loops_score`` says whether agent
        loops score their trajectories.
    """
    tensors_of(requests)["sampling_seed"] = seeds
    requests.meta_info = {  # as in training, the worker adds eos_token_id and pad_token_id of the model
        "recompute_log_prob": False,
        "do_sample": do_sample,
        "validate": True,
        "global_steps": step,
        STAYS_AWAKE: prompts.meta_info.get(STAYS_AWAKE, False),
    }
    if loops_score:
        requests.meta_info["score_trajectories"] = True


def add_extras(known: ExtraColumns, extras: ExtraColumns, before: int, count: int) -> None:
    """Append the extras of ``count`` responses to the extras of the ``before`` earlier responses.

    An extra that some of them lack is None there.

    Raises: ValueError for an extra of another number of responses.
    """
    for name, values in extras.items():
        if len(values) != count:
            raise ValueError(
                f"the reward function returned {name!r} for {len(values)} of {count} validation samples: return it for "
                "every sample of a batch, as None where it says nothing"
            )
    if "reward" in extras:
        _warn_once("the reward function returns 'reward', the name of the score: it is written as 'extra/reward'")
        extras = {"extra/reward" if name == "reward" else name: values for name, values in extras.items()}
    for name in dict.fromkeys([*known, *extras]):
        if name == "reward":
            continue
        if name not in known:
            known[name] = [None] * before
        known[name] += list(extras.get(name, [None] * count))


def summarise(samples: ValidationSamples) -> dict[str, float]:
    """Return the metrics: ``val-core`` for the headline of a data source, ``val-aux`` for all others.

    Each is a function of the responses to the prompts of its data source. A response that is missing or could not be
    scored is a failure: its reward is that of ``settle_failures``, and its other numbers are 0.

    Raises: ValueError when an extra is not there for each sample.
    """
    count = len(samples.scores)
    for name, extra in samples.extras.items():
        if len(extra) != count:
            raise ValueError(f"{name!r} is there for {len(extra)} of {count} validation samples")
    samples.settle_failures()
    reasons = samples.extras.get(FAILURE_COLUMN)
    metrics: dict[str, float] = failure_metrics("val-aux/reward", reasons)
    for source, rows in samples.rows_by_source().items():
        failed = [reasons is not None and reasons[row] is not None for row in rows]
        metrics |= failure_metrics(
            f"val-aux/{source}/reward", None if reasons is None else [reasons[row] for row in rows]
        )
        columns = _columns_of(
            source, {name: [values[row] for row in rows] for name, values in samples.extras.items()}, failed
        )
        variables = process_validation_metrics([source] * len(rows), [samples.uids[row] for row in rows], columns)[
            source
        ]
        headlines = {"acc"} if "acc" in variables else {"reward"}
        if all(failed):  # no response tells whether this scorer returns acc
            headlines |= {"reward"}
        for variable, values in variables.items():
            largest = max(_sample_count(name) for name in values)
            for name, value in values.items():
                is_largest = name.startswith(("mean", "maj", "best")) and _sample_count(name) == largest
                section = "val-core" if variable in headlines and is_largest else "val-aux"
                metrics[f"{section}/{source}/{variable}/{name}"] = value
    if samples.turns:
        turns = np.array(samples.turns)
        figures = {"min": turns.min(), "max": turns.max(), "mean": turns.mean()}
        metrics |= {f"val-aux/num_turns/{name}": float(value) for name, value in figures.items()}
    return metrics


def _columns_of(source: str, extras: ExtraColumns, failed: Sequence[bool]) -> ExtraColumns:
    """Return the columns of a data source that its scorer has returned for at least one response.

    Numbers are 0 where a response has failed, or where the scorer left them out. ``acc`` is 0 too if all have failed.
    """
    columns: ExtraColumns = {"reward": extras["reward"]}
    for name, values in extras.items():
        said = [value for value, is_failure in zip(values, failed, strict=True) if not is_failure and value is not None]
        if name in ("reward", FAILURE_COLUMN) or not said:
            continue
        is_number = all(isinstance(value, Number | np.bool_) for value in said)
        if is_number and len(said) < failed.count(False):
            _warn_once("data_source %r: the scorer leaves out %r in some responses, it counts as 0 there", source, name)
        missing = 0.0 if is_number else None
        keeps = name == "score"  # failed responses keep the score before the penalty
        columns[name] = [
            missing if value is None or (is_failure and not keeps) else value
            for value, is_failure in zip(values, failed, strict=True)
        ]
    if all(failed):
        columns["acc"] = [0.0] * len(failed)
    return columns


def _sample_count(metric: str) -> int:
    """Return k of a metric name such as ``best@k/mean``."""
    return int(metric.split("@")[-1].split("/")[0])
