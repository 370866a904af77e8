"""Requests for responses, and what the trainer does with the answer of a rollout."""

import torch

from verl.algos.names import AdvantageEstimator
from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import BY_REFERENCE, by_reference, is_lazy
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.metric_utils import failure_metrics
from verl.trainer.ppo.reward import PendingReward
from verl.trainer.ppo.shaping import compute_response_mask
from verl.trainer.ppo.state import Metrics, RunState, Timing
from verl.utils.flops_counter import image_lengths
from verl.utils.memory_utils import keep_freed_host_memory
from verl.utils.metric import reduce_metrics
from verl.utils.numerics.seeding import sampling_seeds
from verl.utils.vision.multi_modal import count_shared_bytes, replace_inputs, share
from verl.workers.rewards.model_scores import SCORED_BY_MODEL
from verl.workers.rewards.scoring import FAILURE_COLUMN, UNAVAILABLE
from verl.workers.rollout.base import DROPPED_COLUMN

LARGE_BATCH_BYTES = 1 << 26
"""From this size of a rollout's answer on, the trainer keeps the memory that it frees."""
_SCORING_COLUMNS = frozenset({"data_source", "reward_model", "extra_info", "uid"})

Sampled = tuple[DataProto, DataProto, torch.Tensor]
"""Prompts, their requests or responses, and the seeds of these."""


def take_prompts(batch: DataProto, with_scoring_columns: bool) -> DataProto:
    """Move the columns that the rollout reads out of ``batch``.

    A ``uid`` is copied, to name each row; agent loops read the whole row, so they get the scoring columns too.
    """
    # Images and their tensors go to the workers once, however often a prompt is sampled.
    share(batch.non_tensor_batch)
    columns = [name for name in batch.non_tensor_batch if name not in _SCORING_COLUMNS]
    prompts = batch.pop(["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=columns)
    shared = _SCORING_COLUMNS if with_scoring_columns else {"uid"}
    for name in sorted(shared & batch.non_tensor_batch.keys()):
        prompts.non_tensor_batch[name] = batch.non_tensor_batch[name]
    if "multi_modal_inputs" in columns:  # the models read it too
        batch.non_tensor_batch["multi_modal_inputs"] = prompts.non_tensor_batch["multi_modal_inputs"]
    return prompts


def requests_for(
    prompts: DataProto,
    batch: DataProto,
    run: RunConfig,
    state: RunState,
    loops_score: bool,
    early_scores: bool,
    metrics: Metrics,
) -> Sampled:
    """Return the prompts, a request for each of their responses in a training step, and the seeds of these.

    Args: ``loops_score`` says whether agent loops score their trajectories, and ``early_scores`` whether a reward model
        scores responses while others are generated.
    """
    count_shared_bytes(prompts.non_tensor_batch, metrics)
    if run.trainer.lazy_columns:
        prompts = by_reference(prompts)
        prompts.meta_info[BY_REFERENCE] = batch.meta_info[BY_REFERENCE] = True
    prompts.meta_info["first_prompt"] = batch.meta_info.get("first_prompt", 0)
    prompts.meta_info["global_steps"] = state.step
    if loops_score:
        prompts.meta_info["score_trajectories"] = True
    if early_scores:
        prompts.meta_info[SCORED_BY_MODEL] = True
    requests, seeds = repeated(prompts, run.actor_rollout_ref.rollout.n, state)
    return prompts, requests, seeds


def repeated(prompts: DataProto, num_samples: int, state: RunState) -> tuple[DataProto, torch.Tensor]:
    """Return a request for each sample, and the seeds of these, (num_prompts * num_samples,)."""
    requests = prompts.repeat(repeat_times=num_samples, interleave=True)
    first = prompts.meta_info["first_prompt"]
    seeds = sampling_seeds(state.seed, state.step, len(prompts), num_samples, first_prompt=first)
    tensors_of(requests)["sampling_seed"] = seeds
    return requests, seeds


def take_metrics(output: DataProto, metrics: Metrics, timing: Timing) -> None:
    """Move times and metrics of a rollout to those of the step; several calls in a step add up."""
    if not is_lazy(output) and output.tensor_bytes() >= LARGE_BATCH_BYTES:
        keep_freed_host_memory()  # each step takes such blocks again
    for name, value in output.meta_info.pop("timing", {}).items():
        timing[name] = value if "/" in name else timing.get(name, 0.0) + value
    found = output.meta_info.get("metrics", {})
    counts = {name: value for name, value in found.items() if name.startswith("attempts/")}
    counts = {name: metrics.get(name, 0.0) + value for name, value in counts.items()}
    without_metrics(output, metrics)
    metrics.update(counts)


def drop_metrics(output: DataProto) -> DataProto:
    """Return the responses without times, metrics and images of later turns, which only training reads."""
    output.non_tensor_batch.pop("__later_inputs__", None)
    output.meta_info.pop("timing", None)
    output.meta_info.pop("metrics", None)
    return output


def refuse_all_dropped(output: DataProto, step: int) -> None:
    """Raise RuntimeError if agent loops have failed for every response."""
    dropped = output.non_tensor_batch.get(DROPPED_COLUMN)
    if dropped is not None and dropped.astype(bool).all():
        raise RuntimeError(
            f"step {step}: all {len(dropped)} trajectories were dropped "
            "(actor_rollout_ref.rollout.agent.on_failure=drop), so there is nothing to learn from: see "
            "attempts.jsonl in the folder of the run for the reasons"
        )


def with_responses(batch: DataProto, output: DataProto, num_samples: int, seeds: torch.Tensor) -> DataProto:
    """Return a row for each response, with the columns of its prompt."""
    later = output.non_tensor_batch.pop("__later_inputs__", None)
    batch = batch.repeat(repeat_times=num_samples, interleave=True).union(output)
    if later is not None:
        replace_inputs(batch.non_tensor_batch, later)
    tensors = tensors_of(batch)
    tensors["sampling_seed"] = seeds
    if "response_mask" not in tensors.keys():
        tensors["response_mask"] = compute_response_mask(batch)
    return batch


def described(batch: DataProto, step: int) -> DataProto:
    """Say in ``meta_info`` what workers count, and return the batch."""
    batch.meta_info["global_steps"] = step
    batch.meta_info["global_token_num"] = tensors_of(batch)["attention_mask"].sum(-1).tolist()
    batch.meta_info["images_seqlens"] = image_lengths(batch.non_tensor_batch.get("multi_modal_inputs", ()))
    return batch


def needs_greedy_baseline(run: RunConfig) -> bool:
    """Whether the advantages subtract the score of a greedy response."""
    return run.algorithm.adv_estimator == AdvantageEstimator.REMAX


def greedy_requests(prompts: DataProto, state: RunState) -> DataProto:
    """Return a request for one greedy response to each prompt."""
    requests, _ = repeated(prompts, 1, state)
    requests.meta_info = {**prompts.meta_info, "do_sample": False, SCORED_BY_MODEL: False}
    return requests


def score_greedy(greedy: DataProto, reward: PendingReward, metrics: Metrics) -> torch.Tensor:
    """Return the score of each greedy response, (num_prompts,); NaN where a service that the scorer asks is away.

    The metrics of the scoring, except ``perf/``, get the prefix ``greedy/``.
    """
    found: Metrics = {}
    scores, extras = reward.start(greedy, found).take(greedy, found)
    found |= failure_metrics("reward", extras.get(FAILURE_COLUMN))
    metrics |= {f"greedy/{name}": value for name, value in found.items() if not name.startswith("perf/")}
    unknown = torch.tensor([reason == UNAVAILABLE for reason in extras.get(FAILURE_COLUMN, [None] * len(greedy))])
    return scores.sum(dim=-1).masked_fill(unknown, torch.nan)  # the responses of such a prompt are not trained


def without_metrics(output: DataProto, metrics: Metrics) -> DataProto:
    """Move the metrics of a workers' answer to those of the step, and return the rest."""
    metrics.update(reduce_metrics(output.meta_info.pop("metrics", {})))
    return output


def for_model(batch: DataProto) -> DataProto:
    """Select the part of a batch that models read: tensors, multi-modal inputs and meta_info."""
    columns = [name for name in ("multi_modal_inputs",) if name in batch.non_tensor_batch]
    return batch.select(non_tensor_batch_keys=columns)
