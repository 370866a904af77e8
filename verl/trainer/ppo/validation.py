"""Validation: generate, score and summarise the whole validation set with the weights of this moment."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Number
from typing import TYPE_CHECKING, Any

import numpy as np

from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.ppo.dumps import dump_generations, ground_truths
from verl.trainer.ppo.metric_utils import failure_metrics, process_validation_metrics
from verl.trainer.ppo.phases import check_rollout
from verl.trainer.ppo.reward import compute_reward
from verl.trainer.ppo.traces import trace_batch
from verl.utils.numerics.seeding import prompt_uids, sampling_seeds

if TYPE_CHECKING:
    from verl.trainer.ppo.ray_trainer import RayPPOTrainer


_FAILURE = "reward_failure"  # extra of the reward managers: why a response could not be scored


@dataclass
class ValidationSamples:
    """What one validation has collected, one entry per response in every list."""

    inputs: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    truths: list[Any] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    uids: list[str] = field(default_factory=list)
    sources: list[str] = field(default_factory=list)
    turns: list[int] = field(default_factory=list)
    extras: dict[str, list[Any]] = field(default_factory=lambda: defaultdict(list))


def validate(trainer: "RayPPOTrainer") -> dict[str, float]:
    """Return the ``val-core`` and ``val-aux`` metrics of the current weights.

    The set is empty when its rows are to be judged by a reward model (``reward_model.style: model``), which knows no
    ground truth.

    Raises: ValueError where there is no validation reward function.
    """
    if trainer.val_dataloader is None:
        raise ValueError(
            "data.val_files=null: validation needs a file, or trainer.val_before_train=false and test_freq=-1"
        )
    samples = ValidationSamples()
    first_prompt = 0
    for rows in trainer.val_dataloader:
        batch = DataProto.from_single_dict(rows)
        if trainer.use_rm and judged_by_model(batch):
            return {}
        batch = generate_validation_batch(trainer, batch, first_prompt)
        first_prompt += len(batch) // trainer.config.actor_rollout_ref.rollout.val_kwargs.n
        _score(trainer, batch, samples)
    _publish(trainer, samples)
    return summarise(samples)


def judged_by_model(batch: DataProto) -> bool:
    """Whether the rows ask for a reward model rather than a rule."""
    rows = batch.non_tensor_batch.get("reward_model")
    return rows is not None and len(rows) > 0 and rows[0].get("style") == "model"


def generate_validation_batch(trainer: "RayPPOTrainer", batch: DataProto, first_prompt: int) -> DataProto:
    """Return the batch repeated ``val_kwargs.n`` times with a response in every row."""
    sampling, step, seed = trainer.config.actor_rollout_ref.rollout.val_kwargs, trainer.global_steps, trainer.run_seed
    if "uid" not in batch.non_tensor_batch:
        batch.non_tensor_batch["uid"] = prompt_uids(seed, step, len(batch), "validate", first_prompt)
    seeds = sampling_seeds(seed, step, len(batch), sampling.n, validate=True, first_prompt=first_prompt)
    batch = batch.repeat(repeat_times=sampling.n, interleave=True)
    asked = trainer._get_gen_batch(batch)
    asked.batch["sampling_seed"] = seeds
    asked.meta_info = {  # the worker adds eos_token_id and pad_token_id of the model, as in training
        "recompute_log_prob": False,
        "do_sample": sampling.do_sample,
        "validate": True,
        "global_steps": step,
    }
    padded, pad_size = pad_dataproto_to_divisor(asked, trainer.rollout_divisor())
    output = unpad_dataproto(trainer.rollout_wg_generate(padded), pad_size=pad_size)
    check_rollout(asked, output, step, single_turn=trainer.single_turn)
    output.meta_info.pop("timing", None)
    output.meta_info.pop("metrics", None)
    batch = batch.union(output)
    batch.meta_info["validate"] = True
    return batch


def _score(trainer: "RayPPOTrainer", batch: DataProto, samples: ValidationSamples) -> None:
    if trainer.val_reward_fn is None:
        raise ValueError("validation needs a reward function: val_reward_fn of the trainer is None")
    token_scores, said = compute_reward(batch, trainer.val_reward_fn)
    trace_batch(trainer, batch, token_scores.sum(-1), validate=True)
    scores = token_scores.sum(-1).tolist()
    count = len(scores)
    decode = trainer.tokenizer.batch_decode
    samples.inputs += decode(batch.batch["prompts"], skip_special_tokens=True)
    samples.outputs += decode(batch.batch["responses"], skip_special_tokens=True)
    samples.truths += ground_truths(batch)
    samples.scores += scores
    samples.uids += list(batch.non_tensor_batch["uid"])
    samples.sources += list(batch.non_tensor_batch.get("data_source", ["unknown"] * count))
    samples.extras["reward"] += scores
    add_extras(samples.extras, dict(said), len(samples.scores) - count, count)
    if "__num_turns__" in batch.non_tensor_batch:
        samples.turns += [int(turns) for turns in batch.non_tensor_batch["__num_turns__"]]


def add_extras(known: dict[str, list[Any]], extras: dict[str, list[Any]], before: int, count: int) -> None:
    """Append what the scorers said of ``count`` responses to what they said of those ``before``.

    Where all of either could not be scored, nothing is known of what the scorers would have said: it is None.
    """
    extras.pop("reward", None)
    all_failed = _has_failed_only(extras.get(_FAILURE, ()), count)
    all_failed_before = _has_failed_only(known.get(_FAILURE, ()), before)
    for name in [*extras, *(name for name in known if name not in extras and name != "reward")]:
        if name not in known and all_failed_before:
            known[name] += [None] * before
        known[name] += list(extras.get(name, [None] * count if all_failed else []))


def _has_failed_only(reasons: Sequence[Any], count: int) -> bool:
    return len(reasons) == count and None not in reasons


def _without_gaps(extras: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Count what is not known of the responses that could not be scored as 0, where the others have numbers."""
    reasons = extras.get(_FAILURE)
    if reasons is None:
        return extras
    filled = {}
    for name, values in extras.items():
        is_number = all(isinstance(v, Number | np.bool_) for v, r in zip(values, reasons, strict=True) if r is None)
        missing = 0.0 if is_number and name != _FAILURE else None
        filled[name] = [missing if v is None and r else v for v, r in zip(values, reasons, strict=True)]
    return filled


def _publish(trainer: "RayPPOTrainer", samples: ValidationSamples) -> None:
    """Log a fixed choice of samples, and dump all of them where that is asked for."""
    config, step = trainer.config.trainer, trainer.global_steps
    if config.log_val_generations > 0:
        rows = sorted(zip(samples.inputs, samples.outputs, samples.scores, strict=True), key=lambda row: row[0])
        np.random.RandomState(42).shuffle(rows)
        trainer.log_val_generations(rows[: config.log_val_generations])
    if config.validation_data_dir:
        dump_generations(
            config.validation_data_dir,
            step,
            samples.inputs,
            samples.outputs,
            samples.truths,
            samples.scores,
            samples.extras,
        )


def summarise(samples: ValidationSamples) -> dict[str, float]:
    """Name the metrics: ``val-core`` for the headline of a data source, ``val-aux`` for all others.

    Raises: ValueError when an extra of the reward function is not there for every sample.
    """
    count = len(samples.scores)
    for name, values in samples.extras.items():
        if len(values) != count:
            raise ValueError(
                f"the reward function returned {name!r} for {len(values)} of {count} validation samples: return it "
                "for all of them, whatever their data_source"
            )
    by_source = process_validation_metrics(samples.sources, samples.uids, _without_gaps(samples.extras))
    metrics: dict[str, float] = failure_metrics("val-aux/reward", samples.extras.get(_FAILURE))
    for source, variables in by_source.items():
        headline = "acc" if "acc" in variables else "reward"
        for variable, values in variables.items():
            largest = max(_sample_count(name) for name in values)
            for name, value in values.items():
                core = (
                    variable == headline and name.startswith(("mean", "maj", "best")) and _sample_count(name) == largest
                )
                metrics[f"{'val-core' if core else 'val-aux'}/{source}/{variable}/{name}"] = value
    if samples.turns:
        turns = np.array(samples.turns)
        metrics["val-aux/num_turns/min"] = float(turns.min())
        metrics["val-aux/num_turns/max"] = float(turns.max())
        metrics["val-aux/num_turns/mean"] = float(turns.mean())
    return metrics


def _sample_count(metric: str) -> int:
    """Return k of a metric name such as ``best@k/mean``."""
    return int(metric.split("@")[-1].split("/")[0])
