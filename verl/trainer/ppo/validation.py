"""Validation: generate, score and summarise the whole validation set with the current weights."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from verl.protocol import DataProto, tensors_of
from verl.trainer.ppo.conversations import Conversation, conversations, readable
from verl.trainer.ppo.loaders import Rows
from verl.trainer.ppo.metric_utils import failure_metrics, process_validation_metrics, without_dropped
from verl.trainer.ppo.records import earlier_texts, ground_truths, trace_batch
from verl.trainer.ppo.reward import ExtraColumns, RewardFn, compute_reward
from verl.utils.numerics.seeding import prompt_uids, sampling_seeds
from verl.workers.rewards.scoring import FAILURE_COLUMN


@dataclass
class ValidationSamples:
    """The samples of one validation, one entry per response in every list."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    truths: list[Any] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    conversations: list[Conversation | None] = field(default_factory=list)
    earlier: list[list[dict[str, str]] | None] = field(default_factory=list)
    extras: ExtraColumns = field(default_factory=lambda: defaultdict(list))

    def add(
        self, batch: DataProto, scores: Sequence[float], extras: ExtraColumns, tokenizer: PreTrainedTokenizerBase
    ) -> None:
        """Add the responses of a batch with their scores and the extras of the reward function."""
        tensors = tensors_of(batch)
        num_before = len(self.scores)
        self.inputs += tokenizer.batch_decode(tensors["prompts"], skip_special_tokens=True)
        self.outputs += tokenizer.batch_decode(tensors["responses"], skip_special_tokens=True)
        self.truths += ground_truths(batch)
        self.scores += scores
        self.uids += list(batch.non_tensor_batch["uid"])
        self.sources += list(batch.non_tensor_batch.get("data_source", ["unknown"] * len(scores)))
        self.extras["reward"] += scores
        add_extras(self.extras, dict(extras), num_before, len(scores))
        if "__num_turns__" in batch.non_tensor_batch:
            self.turns += [int(turns) for turns in batch.non_tensor_batch["__num_turns__"]]
        self.conversations += conversations(batch, tokenizer) or [None] * len(scores)
        self.earlier += earlier_texts(batch, tokenizer) or [None] * len(scores)

    @property
    def shown(self) -> list[str]:
        """The responses for people to read: conversations with their roles."""
        pairs = zip(self.outputs, self.conversations, strict=True)
        return [readable(talk) if talk and len(talk) > 1 else output for output, talk in pairs]

    @property
    def columns(self) -> ExtraColumns:
        """The columns of a dump besides texts, truths and scores."""
        columns = dict(self.extras)
        if any(self.conversations):
            columns.setdefault("turns", self.conversations)
        if any(self.earlier):
            columns.setdefault("earlier_segments", self.earlier)
        return columns


def choose_samples(
    inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float], count: int
) -> list[tuple[str, str, float]]:
    """Choose the same (input, output, score) rows in every validation, whatever order they came in."""
    rows = sorted(zip(inputs, outputs, scores, strict=True), key=lambda row: row[0])
    np.random.RandomState(42).shuffle(rows)
    return rows[:count]


def collect_samples(
    loader: Iterable[Rows],
    generate: Callable[[DataProto, int], DataProto],
    reward_fn: RewardFn | None,
    tokenizer: PreTrainedTokenizerBase,
    step: int,
    with_reward_model: bool = False,
) -> ValidationSamples | None:
    """Generate and score the responses to the whole validation set.

    Args:
        generate: returns the responses to a batch of prompts, given the number of prompts before it.
        with_reward_model: whether the run has a reward model.
    Returns: None if a reward model is to judge the rows (``reward_model.style: model``): they have no ground truth.
    Raises: ValueError when there is no validation reward function.
    """
    samples = ValidationSamples()
    num_prompts = 0
    for rows in loader:
        prompts = DataProto.from_single_dict(rows)
        if with_reward_model and judged_by_model(prompts):
            return None
        batch = without_dropped(generate(prompts, num_prompts))
        num_prompts += len(prompts)
        if reward_fn is None:
            raise ValueError("validation needs a reward function: val_reward_fn of the trainer is None")
        token_scores, extras = compute_reward(batch, reward_fn)
        scores = token_scores.sum(-1)
        if "rm_scores" not in tensors_of(batch).keys():  # of agent loops, which have traced each turn
            trace_batch(batch, scores, step, tokenizer, validate=True)
        samples.add(batch, scores.tolist(), extras, tokenizer)
    return samples


def judged_by_model(batch: DataProto) -> bool:
    """Whether the rows ask for a reward model rather than a rule."""
    rows = batch.non_tensor_batch.get("reward_model")
    return rows is not None and len(rows) > 0 and rows[0].get("style") == "model"


def repeat_prompts(
    batch: DataProto, num_samples: int, seed: int, step: int, first_prompt: int
) -> tuple[DataProto, Tensor]:
    """Return ``num_samples`` rows per prompt and their sampling seeds; prompts get a ``uid`` if they lack one."""
    if "uid" not in batch.non_tensor_batch:
        batch.non_tensor_batch["uid"] = prompt_uids(seed, step, len(batch), "validate", first_prompt)
    seeds = sampling_seeds(seed, step, len(batch), num_samples, validate=True, first_prompt=first_prompt)
    return batch.repeat(repeat_times=num_samples, interleave=True), seeds


def add_extras(known: ExtraColumns, extras: ExtraColumns, before: int, count: int) -> None:
    """Append the extras of ``count`` responses to those of the ``before`` responses that came earlier.

    If the scorers failed for all of either, their extras are unknown there: None.
    """
    extras.pop("reward", None)
    all_failed = _has_failed_only(extras.get(FAILURE_COLUMN, ()), count)
    all_failed_before = _has_failed_only(known.get(FAILURE_COLUMN, ()), before)
    for name in [*extras, *(name for name in known if name not in extras and name != "reward")]:
        if name not in known and all_failed_before:
            known[name] += [None] * before
        known[name] += list(extras.get(name, [None] * count if all_failed else []))


def _has_failed_only(reasons: Sequence[str | None], count: int) -> bool:
    return len(reasons) == count and None not in reasons


def _without_gaps(extras: ExtraColumns) -> ExtraColumns:
    """Count unknown extras of responses that could not be scored as 0, if the other responses have numbers."""
    reasons = extras.get(FAILURE_COLUMN)
    if reasons is None:
        return extras
    filled = {}
    for name, values in extras.items():
        is_number = all(isinstance(v, Number | np.bool_) for v, r in zip(values, reasons, strict=True) if r is None)
        missing = 0.0 if is_number and name != FAILURE_COLUMN else None
        filled[name] = [missing if v is None and r else v for v, r in zip(values, reasons, strict=True)]
    return filled


def summarise(samples: ValidationSamples) -> dict[str, float]:
    """Return the metrics: ``val-core`` for the headline of a data source, ``val-aux`` for all others.

    Raises: ValueError when the reward function returned an extra for only some of the samples.
    """
    count = len(samples.scores)
    for name, extra in samples.extras.items():
        if len(extra) != count:
            raise ValueError(
                f"the reward function returned {name!r} for {len(extra)} of {count} validation samples: return it "
                "for every sample of every data_source"
            )
    by_source = process_validation_metrics(samples.sources, samples.uids, _without_gaps(samples.extras))
    metrics: dict[str, float] = failure_metrics("val-aux/reward", samples.extras.get(FAILURE_COLUMN))
    for source, variables in by_source.items():
        headline = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            largest = max(_sample_count(name) for name in values)
            for name, value in values.items():
                is_largest = name.startswith(("mean", "maj", "best")) and _sample_count(name) == largest
                section = "val-core" if variable == headline and is_largest else "val-aux"
                metrics[f"{section}/{source}/{variable}/{name}"] = value
    if samples.turns:
        turns = np.array(samples.turns)
        figures = {"min": turns.min(), "max": turns.max(), "mean": turns.mean()}
        metrics |= {f"val-aux/num_turns/{name}": float(value) for name, value in figures.items()}
    return metrics


def _sample_count(metric: str) -> int:
    """Return k of a metric name such as ``best@k/mean``."""
    return int(metric.split("@")[-1].split("/")[0])
