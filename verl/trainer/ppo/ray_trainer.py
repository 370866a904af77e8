"""The training loop: a driver that holds metadata and small tensors, and worker groups that hold the weights."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset, Sampler

from verl.algos.kl import get_kl_controller
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.single_controller.base.phase import phase
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import after_step, checkpoint, loaders
from verl.trainer.ppo.advantages import apply_kl_penalty, compute_advantage, compute_response_mask
from verl.trainer.ppo.core_algos import AdvantageEstimator, agg_loss
from verl.trainer.ppo.dumps import dump_training_batch
from verl.trainer.ppo.metric_utils import failure_metrics
from verl.trainer.ppo.mismatch_helper import compute_rollout_importance_weights
from verl.trainer.ppo.phases import check_rollout, checked_phase, needs_old_log_probs
from verl.trainer.ppo.profiling import check_steps, end_profiling, start_profiling, stop_profiling
from verl.trainer.ppo.resources import ResourcePoolManager, create_worker_groups
from verl.trainer.ppo.reward import PendingReward
from verl.trainer.ppo.steps import set_total_training_steps
from verl.trainer.ppo.traces import start_traces
from verl.trainer.ppo.trail import NO_TRAIL, Trail
from verl.trainer.ppo.utils import (
    Role,
    need_critic,
    need_reference_policy,
    need_reward_model,
    needs_full_kl,
    reference_is_in_actor,
)
from verl.trainer.ppo.validation import validate
from verl.trainer.run.clock import CLOCK
from verl.trainer.run.output import RunOutput
from verl.utils.debug.metrics import calculate_debug_metrics
from verl.utils.metric import reduce_metrics
from verl.utils.numerics.seeding import derive_seed, prompt_uids, sampling_seeds
from verl.utils.profiler import marked_timer
from verl.utils.rollout_skip import RolloutSkip
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.vision.flops import image_lengths
from verl.utils.vision.multi_modal import count_shared_bytes, share

__all__ = [
    "RayPPOTrainer",
    "ResourcePoolManager",
    "Role",
    "apply_kl_penalty",
    "compute_advantage",
    "compute_response_mask",
]

Metrics = dict[str, Any]
Timing = dict[str, float]

_PHASE_OF_TIMER = {"gen": "generate", "gen_max": "generate", "testing": "validate"}
_PROMPT_TENSORS = ("input_ids", "attention_mask", "position_ids")
_SCORING_COLUMNS = frozenset({"data_source", "reward_model", "extra_info", "uid"})


class RayPPOTrainer:
    """PPO and its relatives over Ray worker groups.

    ``fit`` is the loop. Each phase of a step is a method that takes and returns the batch, adds metrics and seconds
    to the dictionaries that it is given, and can be overridden alone; ``phases.py`` says what each reads and writes.
    """

    trail: Trail = NO_TRAIL

    def __init__(
        self,
        config: Any,
        tokenizer: Any,
        role_worker_mapping: Mapping[Role, Any],
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        processor: Any = None,
        reward_fn: Callable[..., Any] | None = None,
        val_reward_fn: Callable[..., Any] | None = None,
        train_dataset: Dataset | None = None,
        val_dataset: Dataset | None = None,
        collate_fn: Callable[..., Any] | None = None,
        train_sampler: Sampler | None = None,
        device_name: str | None = None,
    ) -> None:
        self.config, self.tokenizer, self.processor = config, tokenizer, processor
        self.run_config = RunConfig.parse(config)
        self.reward_fn, self.val_reward_fn = reward_fn, val_reward_fn
        self.hybrid_engine = config.actor_rollout_ref.hybrid_engine
        assert self.hybrid_engine, "actor_rollout_ref.hybrid_engine must be true: actor and rollout share processes"
        self.role_worker_mapping, self.resource_pool_manager = role_worker_mapping, resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.device_name = device_name or config.trainer.device
        self.use_reference_policy = need_reference_policy(role_worker_mapping)
        self.use_rm = need_reward_model(role_worker_mapping)
        self.use_critic = need_critic(config)
        self.ref_in_actor = reference_is_in_actor(config)
        self.kl_ctrl_in_reward = get_kl_controller(config.algorithm.kl_ctrl)
        self.run_seed: int = config.trainer.seed
        self.async_rollout_mode, self.async_rollout_manager = False, None
        self.single_turn = not config.actor_rollout_ref.rollout.multi_turn.enable
        self.global_steps, self.max_steps_duration = 0, 0.0
        self.unfinished_checkpoint: int | None = None
        self.epoch, self.prompts_drawn = 0, 0
        self.profiled_groups: Sequence[Any] = ()
        self._reward: PendingReward | None = None
        self._extra_columns: list[str] = []
        self._row_order: list[int] = []
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)

    # ---- data

    def _create_dataloader(
        self,
        train_dataset: Dataset | None,
        val_dataset: Dataset | None,
        collate_fn: Callable[..., Any] | None,
        train_sampler: Sampler | None,
    ) -> None:
        """Make the loaders, building the data sets and the sampler that were not given, and count the steps."""
        loaders.follow_run_seed(self.config)
        loaders.follow_rollout(self.config)
        data, trainer = self.config.data, self.config.trainer
        self.train_dataset = train_dataset or loaders.build_dataset(self, "train_files", is_train=True)
        if val_dataset is None and data.val_files is not None:
            val_dataset = loaders.build_dataset(self, "val_files", is_train=False)
        self.val_dataset = val_dataset
        self.train_dataloader = loaders.train_loader(
            self.config, self.run_seed, self.train_dataset, collate_fn, train_sampler
        )
        self.val_dataloader = val_dataset and loaders.validation_loader(data, self.run_seed, val_dataset, collate_fn)
        steps = trainer.total_training_steps
        self.total_training_steps = len(self.train_dataloader) * trainer.total_epochs if steps is None else steps
        set_total_training_steps(self.config, self.total_training_steps)
        self.run_config.set_total_training_steps(self.total_training_steps)
        check_steps(self.config, self.total_training_steps)

    # ---- workers

    def init_workers(self, groups: Mapping[str, RayWorkerGroup] | None = None) -> None:
        """Build the models, on worker groups that were started before or are started now."""
        if groups is None:
            groups = create_worker_groups(
                self.config,
                self.role_worker_mapping,
                self.resource_pool_manager,
                self.ray_worker_group_cls,
                self.device_name,
            )
        CLOCK.mark("worker_processes")
        self.critic_wg, self.rm_wg = groups.get("critic"), groups.get("rm")
        self.ref_policy_wg, self.actor_rollout_wg = groups.get("ref"), groups["actor_rollout"]
        for name in ("critic", "ref", "rm", "actor_rollout"):  # last the rollout, which takes the memory that is left
            if name in groups and not (name == "ref" and self.ref_in_actor):
                with phase(f"init_model of {name}", step=0):
                    groups[name].init_model()
                CLOCK.mark(f"init_{name}")

    def rollout_divisor(self) -> int:
        """Return what the number of requests of one call must be a multiple of."""
        return self.actor_rollout_wg.world_size

    def rollout_wg_generate(self, requests: DataProto) -> DataProto:
        """Generate on the worker group."""
        return self.actor_rollout_wg.generate_sequences(requests)

    # ---- the loop

    def fit(self) -> None:
        """Train until the last step."""
        with self._run():
            if after_step.validate_before_training(self):
                return
            rows = loaders.training_rows(self)
            while not self.is_last_step:
                self.global_steps += 1
                self.prompts_drawn = 0
                metrics: Metrics = {}
                timing: Timing = {}
                self._start_profiling(timing)
                with marked_timer("step", timing):
                    batch = self.collect(rows, metrics, timing)
                    batch = self._checked("infer", batch, self.infer, metrics, timing)
                    batch = self._checked("shape", batch, self.shape, metrics, timing)
                    batch = self._checked("update", batch, self.update, metrics, timing)
                    self._dump(batch, timing)
                self.max_steps_duration = max(self.max_steps_duration, timing["step"])
                after_step.validate_after_step(self, metrics, timing)
                after_step.save_after_step(self, timing)
                self._stop_profiling(timing)
                after_step.finish_step(self, batch, metrics, timing)

    @contextmanager
    def _run(self) -> Iterator[None]:
        """Resume, keep the records of the run, and close them whatever happens."""
        resumed = self._load_checkpoint()
        check_steps(self.config, self.total_training_steps, resumed or 0)
        self.output = RunOutput(self.config, resumed, self.total_training_steps)
        start_traces(self.config)
        self.trail = Trail(self.config.trainer.record_digests, self.config.trainer.record_samples)
        if self.config.actor_rollout_ref.rollout.skip_rollout:
            RolloutSkip(self.config, self.actor_rollout_wg).wrap_generate_sequences()
        CLOCK.mark("resume")
        finished = False
        try:
            yield
            finished = True
        except loaders.EndOfDataError as end:
            after_step.end_early(self, end)
            finished = True
        except Exception as error:
            error.add_note(f"in training step {self.global_steps} of {self.total_training_steps}")
            raise
        finally:
            end_profiling(self)
            self.output.close(finished)

    def _checked(self, name: str, batch: DataProto | None, method: Callable[..., DataProto], *args: Any) -> DataProto:
        with checked_phase(name, batch) as result:
            result.append(method(*args) if batch is None else method(batch, *args))
        self.trail.phase(name, result[0], None if name == "prepare" else self._row_order)
        return result[0]

    @contextmanager
    def _timed(self, timer: str, timing: Timing) -> Iterator[None]:
        """Time a part of a step and name it in the error of a worker that dies in it."""
        with phase(_PHASE_OF_TIMER.get(timer, timer), step=self.global_steps), marked_timer(timer, timing):
            yield

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one."""
        return self.global_steps >= self.total_training_steps

    # ---- phases

    def collect(self, rows: Iterator[Mapping[str, Any]], metrics: Metrics, timing: Timing) -> DataProto:
        """Prepare, generate and score the next batch of the loader; ``rows`` yields as many as a recipe draws."""
        batch = self._checked("prepare", None, self.prepare, next(rows))
        batch = self._checked("generate", batch, self.generate, metrics, timing)
        return self._checked("score", batch, self.score, metrics, timing)

    def prepare(self, rows: Mapping[str, Any]) -> DataProto:
        """Turn the rows of the loader into a batch, one ``uid`` per prompt."""
        batch = DataProto.from_single_dict(rows)
        first, count = self.prompts_drawn, len(batch)
        batch.non_tensor_batch["uid"] = prompt_uids(self.run_seed, self.global_steps, count, first_prompt=first)
        batch.meta_info["first_prompt"] = first
        self.prompts_drawn += count
        return batch

    def generate(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Sample ``rollout.n`` responses per prompt; the rows become the responses."""
        num_samples = self.config.actor_rollout_ref.rollout.n
        prompts = self._get_gen_batch(batch)
        count_shared_bytes(prompts, metrics)
        prompts.meta_info["first_prompt"] = batch.meta_info.get("first_prompt", 0)
        prompts.meta_info["global_steps"] = self.global_steps
        requests = prompts.repeat(repeat_times=num_samples, interleave=True)
        requests.batch["sampling_seed"] = self._sampling_seeds(prompts, num_samples)
        with self._timed("gen", timing):
            output = self.rollout_wg_generate(requests)
        check_rollout(requests, output, self.global_steps, self.single_turn)
        self._take_timing(output, metrics, timing)
        if self.config.algorithm.adv_estimator == AdvantageEstimator.REMAX:
            batch.batch["reward_baselines"] = self._greedy_baseline(batch, prompts, metrics, timing)
        batch = batch.repeat(repeat_times=num_samples, interleave=True).union(output)
        batch.batch["sampling_seed"] = requests.batch["sampling_seed"]
        if "response_mask" not in batch.batch.keys():
            batch.batch["response_mask"] = compute_response_mask(batch)
        return self._arrange(batch, metrics)

    def score(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Score the responses by the reward model and by the rule; ``shape`` takes what runs beside ``infer``."""
        with self._timed("reward", timing):
            self._reward = PendingReward(self).start(batch, metrics)
        return batch

    def infer(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Compute the log-probabilities and values that the rest of the step reads, and no others."""
        if needs_old_log_probs(self.config):
            with self._timed("old_log_prob", timing):
                batch = self._add_old_log_probs(batch, metrics)
        if self.use_reference_policy and (not needs_full_kl(self.config) or self.config.algorithm.use_kl_in_reward):
            with self._timed("ref", timing):
                group = self.actor_rollout_wg if self.ref_in_actor else self.ref_policy_wg
                batch = batch.union(_without_metrics(group.compute_ref_log_prob(_for_model(batch)), metrics))
        if self.use_critic:
            with self._timed("values", timing):
                batch = batch.union(_without_metrics(self.critic_wg.compute_values(_for_model(batch)), metrics))
        return batch

    def shape(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Turn scores into rewards, advantages and returns."""
        algorithm = self.config.algorithm
        with self._timed("reward", timing):
            self._add_scores(batch, metrics)
        with self._timed("adv", timing):
            if algorithm.use_kl_in_reward:
                batch, kl_metrics = apply_kl_penalty(batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
                metrics.update(kl_metrics)
            else:
                batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
            batch, mismatch = self.compute_rollout_importance_weights_and_add_to_batch(batch)
            metrics.update(mismatch)
            batch = compute_advantage(
                batch,
                adv_estimator=algorithm.adv_estimator,
                gamma=algorithm.gamma,
                lam=algorithm.lam,
                num_repeat=self.config.actor_rollout_ref.rollout.n,
                norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
                config=algorithm,
                generator=torch.Generator().manual_seed(derive_seed(self.run_seed, "pf_ppo", self.global_steps)),
            )
        return batch

    def update(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Update the critic, and after its warm-up the actor."""
        if self.use_critic:
            with self._timed("update_critic", timing):
                output = self.critic_wg.update_critic(_for_model(batch))
            metrics.update(reduce_metrics(output.meta_info["metrics"]))
        if self.config.trainer.critic_warmup <= self.global_steps:
            with self._timed("update_actor", timing):
                batch.meta_info["multi_turn"] = self.config.actor_rollout_ref.rollout.multi_turn.enable
                output = self.actor_rollout_wg.update_actor(_for_model(batch))
            metrics.update(reduce_metrics(output.meta_info["metrics"]))
        return batch

    # ---- parts of the phases

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Move what the rollout reads out of ``batch``; ``uid`` goes along as the name of each row."""
        share(batch)  # images and their tensors go to the workers once, however often a prompt is sampled
        columns = [name for name in batch.non_tensor_batch if name not in _SCORING_COLUMNS]
        prompts = batch.pop(batch_keys=list(_PROMPT_TENSORS), non_tensor_batch_keys=columns)
        prompts.non_tensor_batch["uid"] = batch.non_tensor_batch["uid"]
        if "multi_modal_inputs" in columns:  # what the models read after the rollout
            batch.non_tensor_batch["multi_modal_inputs"] = prompts.non_tensor_batch["multi_modal_inputs"]
        return prompts

    def _sampling_seeds(self, prompts: DataProto, num_samples: int) -> torch.Tensor:
        """Return the seeds of the samples of prompts of this step, (num_prompts * num_samples,)."""
        first = prompts.meta_info["first_prompt"]
        return sampling_seeds(self.run_seed, self.global_steps, len(prompts), num_samples, first_prompt=first)

    def _arrange(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Share the rows of a batch out among the ranks; ``_row_order`` says how to put them back."""
        self._row_order = list(range(len(batch)))
        if self.config.trainer.balance_batch:
            self._balance_batch(batch, metrics)
        batch.meta_info["global_steps"] = self.global_steps
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        batch.meta_info["images_seqlens"] = image_lengths(batch.non_tensor_batch.get("multi_modal_inputs", ()))
        return batch

    def _take_timing(self, output: DataProto, metrics: Metrics, timing: Timing) -> None:
        """Take over what the rollout has measured; seconds of several calls in a step add up."""
        for name, value in output.meta_info.pop("timing", {}).items():
            timing[name] = value if "/" in name else timing.get(name, 0.0) + value
        _without_metrics(output, metrics)

    def _greedy_baseline(self, batch: DataProto, prompts: DataProto, metrics: Metrics, timing: Timing) -> torch.Tensor:
        """Return the score of one greedy response per prompt, (num_prompts,), as ReMax subtracts it.

        What its scoring reports, failures among it, time and memory not, goes to the metrics under ``greedy/``.
        """
        requests = prompts.repeat(repeat_times=1)
        requests.meta_info = {**prompts.meta_info, "do_sample": False}
        requests.batch["sampling_seed"] = self._sampling_seeds(prompts, 1)
        with self._timed("gen_max", timing):
            padded, pad_size = pad_dataproto_to_divisor(requests, self.rollout_divisor())
            output = unpad_dataproto(self.rollout_wg_generate(padded), pad_size=pad_size)
            check_rollout(requests, output, self.global_steps, self.single_turn)
            output.meta_info.pop("timing", None)
            output.meta_info.pop("metrics", None)
            greedy = batch.repeat(repeat_times=1).union(output)
            found: Metrics = {}
            scores, extras = PendingReward(self).start(greedy, found).take(greedy, found)
        found |= failure_metrics("reward", extras.get("reward_failure"))
        metrics |= {f"greedy/{name}": value for name, value in found.items() if not name.startswith("perf/")}
        return scores.sum(dim=-1)

    def _balance_batch(self, batch: DataProto, metrics: Metrics, logging_prefix: str = "global_seqlen") -> None:
        """Reorder the rows so that every rank gets as many tokens."""
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        # The workers that share rows may be more than divide them: a multiple of those that do not share is left.
        parts = math.gcd(len(lengths), self.actor_rollout_wg.world_size)
        partitions = get_seqlen_balanced_partitions(lengths, k_partitions=parts, equal_size=True)
        order = [row for part in partitions for row in part]
        batch.reorder(torch.tensor(order))
        self._row_order = np.argsort(order).tolist()
        metrics.update(log_seqlen_unbalance(lengths, partitions, prefix=logging_prefix))

    def _add_old_log_probs(self, batch: DataProto, metrics: Metrics) -> DataProto:
        output = _without_metrics(self.actor_rollout_wg.compute_log_prob(_for_model(batch)), metrics)
        entropy = agg_loss(
            loss_mat=output.batch.pop("entropys"),
            loss_mask=batch.batch["response_mask"],
            loss_agg_mode=self.config.actor_rollout_ref.actor.loss_agg_mode,
            length=self.config.actor_rollout_ref.actor.get("loss_scale_factor"),
        )
        metrics["actor/entropy"] = entropy.item()
        batch = batch.union(output)
        if "rollout_log_probs" in batch.batch.keys():
            metrics.update(calculate_debug_metrics(batch))
        return batch

    def compute_rollout_importance_weights_and_add_to_batch(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Return how far the rollout is from training, and the batch, with weights where the loss is to use them.

        Raises: ValueError when the loss is to use them and the rollout has given no log-probabilities.
        """
        algorithm = self.config.algorithm
        if algorithm.rollout_is_threshold is None:
            return batch, {}
        if "rollout_log_probs" not in batch.batch.keys():
            if algorithm.rollout_is:
                raise ValueError(
                    "algorithm.rollout_is=true: the rollout returned no rollout_log_probs to make importance weights "
                    "of; set actor_rollout_ref.rollout.calculate_log_probs=true, or algorithm.rollout_is=false"
                )
            return batch, {}
        weights, metrics = compute_rollout_importance_weights(
            old_log_prob=batch.batch["old_log_probs"],
            rollout_log_prob=batch.batch["rollout_log_probs"],
            response_mask=batch.batch["response_mask"],
            rollout_is_level=algorithm.rollout_is_level,
            rollout_is_mode=algorithm.rollout_is_mode,
            rollout_is_threshold=algorithm.rollout_is_threshold,
            rollout_is_threshold_lower=algorithm.rollout_is_threshold_lower,
            rollout_is_veto_threshold=algorithm.rollout_is_veto_threshold,
        )
        return batch.union(weights) if algorithm.rollout_is else batch, metrics

    def _add_scores(self, batch: DataProto, metrics: Metrics | None = None) -> None:
        """Add what ``score`` has begun, unless that was done: scores, and the extras of the reward function."""
        pending, self._reward = self._reward, None
        if pending is None:
            return
        scores, extras = pending.take(batch, {} if metrics is None else metrics)
        batch.batch["token_level_scores"] = scores
        self._extra_columns = list(extras)
        batch.non_tensor_batch.update({name: _column(values) for name, values in extras.items()})

    # ---- after the step

    def _dump(self, batch: DataProto, timing: Timing) -> None:
        folder = self.config.trainer.rollout_data_dir
        if folder:
            extras = {name: list(batch.non_tensor_batch[name]) for name in self._extra_columns}
            with marked_timer("dump_rollout_generations", timing):
                dump_training_batch(folder, self.global_steps, batch, self.tokenizer, extras, self._row_order)

    def _validate(self) -> dict[str, float]:
        """Return the metrics of the current weights on the validation set."""
        return validate(self)

    def log_val_generations(self, rows: list[tuple[str, str, float]]) -> None:
        """Show some validation samples in the trackers that can."""
        self.output.log_generations(rows, self.global_steps)

    # ---- checkpoints and profiling

    def _save_checkpoint(self) -> None:
        """Write all parts of a checkpoint, and last the file that names it."""
        checkpoint.save_checkpoint(self)

    def _load_checkpoint(self) -> int | None:
        """Restore the run that the configuration continues; returns its step, None for a fresh start."""
        return checkpoint.load_checkpoint(self)

    def _start_profiling(self, timing: Timing) -> None:
        """Start the role profilers, where this step is listed and they do not run on from the one before."""
        start_profiling(self, timing)

    def _stop_profiling(self, timing: Timing) -> None:
        """Stop the role profilers, where they do not run on into the next step."""
        stop_profiling(self, timing)


def _without_metrics(output: DataProto, metrics: Metrics) -> DataProto:
    """Move the metrics of an answer of the workers to those of the step, and return the rest."""
    metrics.update(reduce_metrics(output.meta_info.pop("metrics", {})))
    return output


def _for_model(batch: DataProto) -> DataProto:
    """Return the part of a batch that models read: tensors, model inputs of other kinds and meta_info."""
    columns = [name for name in ("multi_modal_inputs",) if name in batch.non_tensor_batch]
    return batch.select(non_tensor_batch_keys=columns)


def _column(values: list[Any]) -> np.ndarray:
    """Return values as an object array of one axis, lists among them as objects."""
    return np.fromiter(values, dtype=object, count=len(values))
