"""The rollout of a run as the trainer uses it: agent loops, or the worker group that generates by itself."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from omegaconf import DictConfig

from verl.algos.names import AdvantageEstimator
from verl.experimental.agent_loop.rewards import scores_one_by_one
from verl.protocol import DataProto, pad_dataproto_to_divisor, tensors_of, unpad_dataproto
from verl.protocol.lazy import BY_REFERENCE, by_reference, is_lazy
from verl.single_controller.base.driver_phase import phase
from verl.single_controller.base.worker_group import adapted
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.metric_utils import failure_metrics
from verl.trainer.ppo.phases import check_rollout
from verl.trainer.ppo.reward import PendingReward, RewardFn
from verl.trainer.ppo.rollout_skip import RolloutSkip
from verl.trainer.ppo.shaping import compute_response_mask
from verl.trainer.ppo.state import Metrics, RunState, Timing, timed
from verl.trainer.ppo.validation import complete_requests, repeat_prompts
from verl.utils.flops_counter import image_lengths
from verl.utils.memory_utils import keep_freed_host_memory
from verl.utils.metric import reduce_metrics
from verl.utils.numerics.seeding import sampling_seeds
from verl.utils.observe.attempts import AttemptLine
from verl.utils.observe.timeline import RECORDED, Part, is_recording
from verl.utils.vision.multi_modal import count_shared_bytes, replace_inputs, share
from verl.workers.rewards.model_scores import SCORED_BY_MODEL
from verl.workers.rewards.scoring import FAILURE_COLUMN, UNAVAILABLE
from verl.workers.rollout.base import DROPPED_COLUMN

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopManager

LARGE_BATCH_BYTES = 1 << 26
"""From this size of a rollout's answer on, the trainer keeps the memory that it frees."""
_SCORING_COLUMNS = frozenset({"data_source", "reward_model", "extra_info", "uid"})

Sampled = tuple[DataProto, DataProto, torch.Tensor]
"""Prompts, their requests or responses, and the seeds of these."""
TakePrompts = Callable[[DataProto], DataProto]
"""Moves the columns that the rollout reads out of a batch."""


def start_agent_loops(
    config: DictConfig, actor: RayWorkerGroup, reward_model: RayWorkerGroup | None
) -> "AgentLoopManager":
    """Start the actors that run agent loops; they import while the models are built."""
    from verl.experimental.agent_loop import AgentLoopManager

    return AgentLoopManager(config, actor, reward_model)


class Rollouts:
    """Samples responses by agent loops or on the worker group, and knows which weights the engine has."""

    def __init__(
        self,
        run: RunConfig,
        state: RunState,
        group: RayWorkerGroup,
        manager: "AgentLoopManager | None",
        take_prompts: TakePrompts,
        reward_model: RayWorkerGroup | None = None,
        scores_early: bool = True,
        log_attempts: Callable[[Sequence[AttemptLine]], None] | None = None,
    ) -> None:
        """Sample with the workers of ``group``, or with the agent loops of ``manager``.

        Args: ``reward_model`` scores the responses, with ``scores_early`` while others are generated;
            ``log_attempts`` takes the account of the attempts of agent loops.
        """
        self._run = run
        self._state = state
        self._group = group
        self._manager = manager
        self._source = adapted(manager or group)
        self._take_prompts = take_prompts
        self._reward_model = reward_model
        self._scores_early = scores_early
        self._log_attempts = log_attempts
        self._is_skipped = run.actor_rollout_ref.rollout.skip_rollout

    # ---- the responses of a training step

    def sample(self, batch: DataProto, reward_fn: RewardFn | None, metrics: Metrics, timing: Timing) -> Sampled:
        """Sample ``rollout.n`` responses per prompt; return prompts, responses, and the responses' seeds.

        The columns that the rollout reads move from ``batch`` to the prompts.
        """
        prompts, requests, seeds = self.requests(batch, reward_fn, metrics)
        with timed("gen", timing, self._state.step):
            output = self.generate(requests)
        self.receive(requests, output, metrics, timing)
        return prompts, output, seeds

    def requests(self, batch: DataProto, reward_fn: RewardFn | None, metrics: Metrics) -> Sampled:
        """Return the prompts, the requests for their responses, and the requests' seeds."""
        prompts = self._take_prompts(batch)
        count_shared_bytes(prompts.non_tensor_batch, metrics)
        if self._run.trainer.lazy_columns:
            prompts = by_reference(prompts)
            prompts.meta_info[BY_REFERENCE] = batch.meta_info[BY_REFERENCE] = True
        prompts.meta_info["first_prompt"] = batch.meta_info.get("first_prompt", 0)
        prompts.meta_info["global_steps"] = self._state.step
        if self.loops_score(reward_fn):
            prompts.meta_info["score_trajectories"] = True
        if self._reward_model_need_not_wait(prompts):
            prompts.meta_info[SCORED_BY_MODEL] = True
        requests, seeds = repeated(prompts, self._run.actor_rollout_ref.rollout.n, self._state)
        return prompts, requests, seeds

    def receive(self, requests: DataProto, output: DataProto, metrics: Metrics, timing: Timing) -> None:
        """Check the responses of a rollout, and move their times and metrics to those of the step."""
        self._check(requests, output)
        take_metrics(output, metrics, timing)

    def greedy_baseline(
        self, batch: DataProto, prompts: DataProto, reward: PendingReward, metrics: Metrics, timing: Timing
    ) -> torch.Tensor:
        """Return the score of one greedy response per prompt, (num_prompts,), as ReMax subtracts it."""
        requests = greedy_requests(prompts, self._state)
        with timed("gen_max", timing, self._state.step):
            greedy = batch.repeat(repeat_times=1).union(self._generate_padded(requests))
            return score_greedy(greedy, reward, metrics)

    # ---- responses

    def validate(self, prompts: DataProto, first_prompt: int, reward_fn: RewardFn | None) -> DataProto:
        """Return ``val_kwargs.n`` responses to each prompt; ``first_prompt`` prompts of the set came before."""
        options = self._run.actor_rollout_ref.rollout.val_kwargs
        state = self._state
        batch, seeds = repeat_prompts(prompts, options.n, state.seed, state.step, first_prompt)
        requests = self._take_prompts(batch)
        complete_requests(requests, prompts, seeds, options.do_sample, state.step, self.loops_score(reward_fn))
        batch = batch.union(self._generate_padded(requests))
        batch.meta_info["validate"] = True
        return batch

    def generate(self, requests: DataProto) -> DataProto:
        """Return the responses; the workers sync the weights first if the engine is behind."""
        if self._manager is not None and is_recording():
            requests.meta_info[RECORDED] = True
        try:
            output: DataProto = self._source.generate_sequences(requests)
        finally:  # the log has failed attempts too
            if self._log_attempts is not None:
                self._log_attempts(self._source.take_attempts())
        self._state.engine_version = self._state.weights_version
        return output

    def _generate_padded(self, requests: DataProto) -> DataProto:
        """Generate for any number of requests, and drop the timers and metrics of the rollout."""
        padded, pad_size = pad_dataproto_to_divisor(requests, self._group.world_size)
        output = unpad_dataproto(self.generate(padded), pad_size=pad_size)
        self._check(requests, output)
        return drop_metrics(output)

    def _check(self, requests: DataProto, output: DataProto) -> None:
        """Check a rollout where its columns are; agent loops write masks and prompts themselves."""
        single_turn = not self._run.actor_rollout_ref.rollout.serves
        check_rollout(requests, output, self._state.step, single_turn, self._group)

    def skip(self, config: DictConfig) -> None:
        """Read and write the responses of an earlier run, if the configuration asks for it."""
        if self._is_skipped:
            RolloutSkip(config, self._source).wrap_generate_sequences()

    # ---- weights

    def sync_weights(self) -> None:
        """Bring the weights of the engine up to date; do nothing when the versions agree."""
        state = self._state
        if state.engine_version == state.weights_version or self._is_skipped:
            return
        is_standalone = self._manager is not None and not self._run.actor_rollout_ref.hybrid_engine
        source = self._source if is_standalone else self._group
        if not hasattr(source, "sync_weights"):  # the workers of a fork sync only when they generate
            return
        with phase("weight_sync", step=state.step):
            source.sync_weights(state.step)
        state.engine_version = state.weights_version

    # ---- scores

    def loops_score(self, reward_fn: RewardFn | None) -> bool:
        """Whether agent loops score their trajectories: with a rule that judges each by itself."""
        if self._manager is None or self._reward_model is not None or self._is_skipped:
            return False  # a rollout that was kept may be scored by another rule
        return scores_one_by_one(reward_fn)

    def _reward_model_need_not_wait(self, prompts: DataProto) -> bool:
        """Whether a reward model with its own devices scores responses while agent loops generate the others.

        Images of later turns are not known before the whole batch is there.
        """
        return (
            self._manager is not None
            and self._reward_model is not None
            and self._scores_early
            and self._run.reward_model.enable_resource_pool
            and not self._is_skipped
            and "multi_modal_inputs" not in prompts.non_tensor_batch
        )

    # ---- the actors that run agent loops

    def wait_until_ready(self) -> None:
        """Wait until the actors have started."""
        with phase("init_agent_loops", step=0):
            self._source.wait_until_ready()

    def flush_traces(self) -> None:
        """Wait until the actors have sent their traces."""
        self._source.flush_traces()

    def take_timeline(self) -> list[Part]:
        """Return the spans that the actors have recorded since the last call."""
        return self._source.take_timeline()


# ---- requests and responses


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


def repeated(prompts: DataProto, num_samples: int, state: RunState) -> tuple[DataProto, torch.Tensor]:
    """Return a request for each sample, and the requests' seeds, (num_prompts * num_samples,)."""
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
    """Add numbers that workers count to ``meta_info``, and return the batch."""
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
    """Return the score of each greedy response, (num_prompts,); NaN if a service of the scorer was unavailable.

    The metrics of the scoring, except ``perf/``, get the prefix ``greedy/``.
    """
    found: Metrics = {}
    scores, extras = reward.start(greedy, found).take(greedy, found)
    found |= failure_metrics("reward", extras.get(FAILURE_COLUMN))
    metrics |= {f"greedy/{name}": value for name, value in found.items() if not name.startswith("perf/")}
    unknown = torch.tensor([reason == UNAVAILABLE for reason in extras.get(FAILURE_COLUMN, [None] * len(greedy))])
    # NaN excludes the responses of such a prompt from training.
    return scores.sum(dim=-1).masked_fill(unknown, torch.nan)


def without_metrics(output: DataProto, metrics: Metrics) -> DataProto:
    """Move the metrics of the workers' output to the metrics of the step, and return the rest of the output."""
    metrics.update(reduce_metrics(output.meta_info.pop("metrics", {})))
    return output


def for_model(batch: DataProto) -> DataProto:
    """Select the part of a batch that models read: tensors, multi-modal inputs and meta_info."""
    columns = [name for name in ("multi_modal_inputs",) if name in batch.non_tensor_batch]
    return batch.select(non_tensor_batch_keys=columns)
