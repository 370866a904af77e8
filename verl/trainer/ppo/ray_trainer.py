"""The training loop: a driver that holds metadata and small tensors, and worker groups that hold the weights."""

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.algos.kl import get_kl_controller
from verl.algos.names import AdvantageEstimator
from verl.base_config import WrongInput
from verl.models.transformers.packing import packs_rows
from verl.protocol import DataProto, pad_dataproto_to_divisor, tensors_of, unpad_dataproto
from verl.protocol.lazy import BY_REFERENCE, by_reference, is_lazy, take_touched
from verl.single_controller.base.errors import phase
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.rules.batch import workers_of_a_shard
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import columns, loaders, metric_utils, profiling, spares
from verl.trainer.ppo.checkpoint import Checkpoints, DataPosition, reference_fields
from verl.trainer.ppo.grouping import Groups, keep_groups
from verl.trainer.ppo.lengths import lengths_of
from verl.trainer.ppo.loaders import CollateFn, Rows
from verl.trainer.ppo.metric_utils import compute_data_metrics as compute_data_metrics  # forks import these from here
from verl.trainer.ppo.metric_utils import compute_throughout_metrics as compute_throughout_metrics
from verl.trainer.ppo.metric_utils import compute_timing_metrics as compute_timing_metrics
from verl.trainer.ppo.metric_utils import process_validation_metrics as process_validation_metrics
from verl.trainer.ppo.phases import check_rollout, checked_phase, needs_old_log_probs
from verl.trainer.ppo.records import StepRecord, dump_generations, scored_columns, trace_batch
from verl.trainer.ppo.resources import ResourcePoolManager, WorkerClasses, create_worker_groups, set_schedule_steps
from verl.trainer.ppo.reward import (
    ExtraColumns,
    NothingScoredError,
    PendingReward,
    RewardFn,
    leave_unscored_out,
    refuse_nothing_scored,
)
from verl.trainer.ppo.rollout_skip import RolloutSkip
from verl.trainer.ppo.segments import (
    SEGMENTS_COLUMN,
    TRAJECTORY_COLUMN,
    arrange,
    balance_metrics,
    has_segments,
    per_trajectory,
    placed,
    segment_rows,
    without_segments,
)
from verl.trainer.ppo.shaping import (
    add_rollout_weights,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,
    with_rollout_log_probs,
)
from verl.trainer.ppo.state import Metrics, RunState, Timing
from verl.trainer.ppo.timelines import Timelines
from verl.trainer.ppo.utils import Role as Role  # forks import it from here
from verl.trainer.ppo.utils import need_reference_policy, need_reward_model
from verl.trainer.ppo.validation import choose_samples, collect_samples, repeat_prompts, summarise
from verl.trainer.run.clock import CLOCK
from verl.trainer.run.display import is_end_requested
from verl.trainer.run.ending import EndRequested
from verl.trainer.run.output import RunOutput, log_generations
from verl.trainer.run.resume import find_resume_folder, name_start, run_folder
from verl.utils.dataset.factory import create_rl_dataset, create_rl_sampler, warn_of_lost_state
from verl.utils.flops_counter import image_lengths
from verl.utils.memory_utils import keep_freed_host_memory
from verl.utils.metric import reduce_metrics
from verl.utils.numerics.seeding import derive_seed, prompt_uids, sampling_seeds
from verl.utils.observe.rollout_trace import RolloutTraceConfig
from verl.utils.observe.timeline import RECORDED, Part, is_recording
from verl.utils.observe.tracking import Trackers, ValidationGenerationsLogger
from verl.utils.profiler import marked_timer
from verl.utils.seqlen_balancing import Partition, get_seqlen_balanced_partitions, log_seqlen_unbalance
from verl.utils.vision.multi_modal import count_shared_bytes, replace_inputs, share
from verl.workers.rewards.model_scores import SCORED_BY_MODEL
from verl.workers.rewards.scoring import FAILURE_COLUMN, UNAVAILABLE
from verl.workers.roles.batching import NUM_TRAJECTORIES
from verl.workers.rollout.base import DROPPED_COLUMN, STAYS_AWAKE

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopManager

logger = logging.getLogger(__name__)

LARGE_BATCH_BYTES = 1 << 26
"""From this size of a rollout's answer on, the trainer keeps the memory that it frees."""
_PHASE_OF_TIMER = {"gen": "generate", "gen_max": "generate", "testing": "validate"}
_SCORING_COLUMNS = frozenset({"data_source", "reward_model", "extra_info", "uid"})


class RayPPOTrainer:
    """PPO and its relatives over Ray worker groups.

    ``fit`` is the loop. Each phase of a step is a method that takes and returns the batch, adds metrics and seconds
    to the given dictionaries, and can be overridden alone; ``phases.py`` says what each reads and writes.

    Attributes: ``run_config`` is the typed configuration, parsed once; ``config`` is the tree that forks read and
        write. ``state`` says where the run stands; the established names ``global_steps``, ``total_training_steps``
        and ``max_steps_duration`` read and write it.
    """

    # For forks whose constructors do not set them.
    hybrid_engine: bool = True
    reward_fn: RewardFn | None = None
    val_reward_fn: RewardFn | None = None

    def __init__(
        self,
        config: DictConfig,
        tokenizer: PreTrainedTokenizerBase,
        role_worker_mapping: WorkerClasses,
        resource_pool_manager: ResourcePoolManager,
        ray_worker_group_cls: type[RayWorkerGroup] = RayWorkerGroup,
        processor: ProcessorMixin | None = None,
        reward_fn: RewardFn | None = None,
        val_reward_fn: RewardFn | None = None,
        train_dataset: Dataset[Rows] | None = None,
        val_dataset: Dataset[Rows] | None = None,
        collate_fn: CollateFn | None = None,
        train_sampler: Sampler[int] | None = None,
        device_name: str | None = None,
    ) -> None:
        self.config = config
        self.run_config = RunConfig.parse(config)
        self.tokenizer = tokenizer
        self.processor = processor
        self.reward_fn = reward_fn
        self.val_reward_fn = val_reward_fn
        run = self.run_config
        self.hybrid_engine = run.actor_rollout_ref.hybrid_engine
        self.role_worker_mapping = role_worker_mapping
        self.resource_pool_manager = resource_pool_manager
        self.ray_worker_group_cls = ray_worker_group_cls
        self.device_name = device_name or run.trainer.device
        resource_pool_manager.device_name = resource_pool_manager.device_name or self.device_name
        self.use_reference_policy = need_reference_policy(role_worker_mapping)
        self.use_rm = need_reward_model(role_worker_mapping)
        self.use_critic = run.critic is not None
        self.ref_in_actor = run.actor_rollout_ref.reference_is_in_actor
        self.kl_ctrl_in_reward = get_kl_controller(run.algorithm.kl_ctrl)
        options = run.trainer
        self.validation_generations_logger = ValidationGenerationsLogger(options.project_name, options.experiment_name)
        self._trackers: Trackers = [options.logger] if isinstance(options.logger, str) else options.logger
        self.single_turn = not run.actor_rollout_ref.rollout.serves  # agent loops write masks and prompts themselves
        self.state = RunState(seed=run.trainer.seed)
        self.step_record = StepRecord(digests=False, num_samples=0)
        self.timelines: Timelines | None = None
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)

    _step_position: DataPosition | None = None
    """Where the data of the current step begin, if they may end before it is full."""
    _catches_up: bool = False
    """Whether a checkpoint was loaded and nothing was drawn since: ``Checkpoints.after_draw`` is still to come."""
    _may_end_before: tuple[str, ...] = ("score", "infer", "shape")
    """Phases before which a step may end: it has not yet changed what a checkpoint of the last step holds."""
    async_rollout_mode = False
    async_rollout_manager: "AgentLoopManager | None" = None

    # ---- established names for parts of the state

    @property
    def global_steps(self) -> int:
        """Number of the current step."""
        return self.state.step

    @global_steps.setter
    def global_steps(self, step: int) -> None:
        self.state.step = step

    @property
    def total_training_steps(self) -> int:
        """Number of steps of the whole run."""
        return self.state.total_steps

    @total_training_steps.setter
    def total_training_steps(self, steps: int) -> None:
        self.state.total_steps = steps

    @property
    def run_seed(self) -> int:
        """Seed of the run, from which a recipe derives its own (``derive_seed``)."""
        return self.state.seed

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one."""
        return self.state.is_last_step

    @property
    def max_steps_duration(self) -> float:
        """Seconds of the longest step."""
        return self.state.max_step_s

    @max_steps_duration.setter
    def max_steps_duration(self, seconds: float) -> None:
        self.state.max_step_s = seconds

    # ---- data

    def _create_dataloader(
        self,
        train_dataset: Dataset[Rows] | None,
        val_dataset: Dataset[Rows] | None,
        collate_fn: CollateFn | None,
        train_sampler: Sampler[int] | None,
    ) -> None:
        """Make the loaders, build the data sets and the sampler that were not given, and count the steps."""
        loaders.complete_data_node(self.config)
        node = self.config.data  # data sets and samplers of a fork may read keys that DataConfig does not have
        if train_dataset is None:
            train_dataset = create_rl_dataset(node.train_files, node, self.tokenizer, self.processor)
        if val_dataset is None and node.val_files:
            val_dataset = create_rl_dataset(node.val_files, node, self.tokenizer, self.processor, is_train=False)
        if train_sampler is None:
            train_sampler = create_rl_sampler(node, train_dataset)
        self.train_dataset = train_dataset
        self.val_dataset = val_dataset
        data = self.run_config.data
        seed = self.state.seed
        self.train_dataloader = loaders.train_loader(data, seed, train_dataset, collate_fn, train_sampler)
        self.val_dataloader = None
        if val_dataset is not None:
            self.val_dataloader = loaders.validation_loader(data, seed, val_dataset, collate_fn)
        steps = self.run_config.trainer.total_training_steps
        if steps is None:
            steps = len(self.train_dataloader) * self.run_config.trainer.total_epochs
        self.state.total_steps = steps
        set_schedule_steps(self.config, steps)
        self.run_config.set_total_training_steps(steps)
        warm_up = self.run_config.trainer.critic_warmup
        if steps <= warm_up:
            logger.warning("trainer.critic_warmup=%d: covers all %d steps, the actor is not trained", warm_up, steps)
        profiling.check_steps(self.run_config.global_profiler.steps, steps)

    # ---- workers

    def init_workers(self, groups: Mapping[str, RayWorkerGroup] | None = None) -> None:
        """Build the models on the given worker groups, or on groups that it starts."""
        self._take_over_changes()
        if groups is None:
            groups = create_worker_groups(
                self.config,
                self.run_config,
                self.role_worker_mapping,
                self.resource_pool_manager,
                self.ray_worker_group_cls,
                self.device_name,
            )
        CLOCK.mark("worker_processes")
        self.critic_wg = groups.get("critic")
        self.rm_wg = groups.get("rm")
        self.ref_policy_wg = groups.get("ref")
        self.actor_rollout_wg = groups["actor_rollout"]
        self._start_agent_loops()
        # The rollout comes last, because it takes the memory that is left.
        for name in ("critic", "ref", "rm", "actor_rollout"):
            if name in groups and not (name == "ref" and self.ref_in_actor):
                with phase(f"init_model of {name}", step=0):
                    groups[name].init_model()
                CLOCK.mark(f"init_{name}")
        wait_until_ready = getattr(self.async_rollout_manager, "wait_until_ready", None)
        if wait_until_ready is not None:  # a manager of a fork need not have it
            with phase("init_agent_loops", step=0):
                wait_until_ready()

    def _take_over_changes(self) -> None:
        """Read the configuration again, because a fork may have written to ``config`` since."""
        self.run_config = RunConfig.parse(self.config)

    def _start_agent_loops(self) -> None:
        """Start the actors that run agent loops, if the rollout serves; they import while the models are built."""
        if not self.run_config.actor_rollout_ref.rollout.serves:
            return
        from verl.experimental.agent_loop import AgentLoopManager

        self.async_rollout_mode = True
        self.async_rollout_manager = AgentLoopManager(self.config, self.actor_rollout_wg, self.rm_wg)

    def worker_groups(self) -> dict[str, RayWorkerGroup]:
        """Return the worker groups of the run by name."""
        groups = {
            "actor_rollout": self.actor_rollout_wg,
            "ref": None if self.ref_in_actor else self.ref_policy_wg,
            "critic": self.critic_wg,
            "rm": self.rm_wg,
        }
        return {name: group for name, group in groups.items() if group is not None}

    def rollout_wg_generate(self, requests: DataProto) -> DataProto:
        """Generate by agent loops or on the worker group; both sync the weights first if the engine is behind."""
        generator = self.async_rollout_manager or self.actor_rollout_wg
        if self.async_rollout_manager is not None and is_recording():
            requests.meta_info[RECORDED] = True
        try:
            output: DataProto = generator.generate_sequences(requests)
        finally:  # what failed is in the account too
            take_attempts = getattr(self.async_rollout_manager, "take_attempts", None)
            if take_attempts is not None:  # a manager of a fork need not have it
                self.output.attempts.log(self.state.step, take_attempts())
        self.state.engine_version = self.state.weights_version
        return output

    def sync_weights(self) -> None:
        """Bring the weights of the rollout engine up to date; do nothing when the versions agree.

        The engine then stays awake until it has generated. So ``fit`` calls this only before it generates, and after
        validation and checkpoint, which need the memory. A loop without this call is right too: the workers sync by
        themselves when they generate with an engine that is behind.
        """
        state = self.state
        if state.engine_version == state.weights_version or self.run_config.actor_rollout_ref.rollout.skip_rollout:
            return
        if not self.hybrid_engine and self.async_rollout_manager is not None:
            with phase("weight_sync", step=state.step):
                self.async_rollout_manager.sync_weights(state.step)
            state.engine_version = state.weights_version
        elif hasattr(self.actor_rollout_wg, "sync_weights"):  # a fork's worker class need not have it
            with phase("weight_sync", step=state.step):
                self.actor_rollout_wg.sync_weights(state.step)
            state.engine_version = state.weights_version

    def _sync_before_generation(self, timing: Timing) -> None:
        """Bring the rollout engine up to date before ``collect``; a recipe may do it at another time."""
        with self._timed("gen", timing):
            self.sync_weights()

    # ---- the loop

    def fit(self) -> None:
        """Train until the last step."""
        with self._run():
            if self._validate_before_training():
                return
            rows = self._training_rows()
            while not self.state.is_last_step:
                self._begin_step()
                metrics: Metrics = {}
                timing: Timing = {}
                self._profile_from_here(timing)
                if self.timelines is not None:  # a fork may open its outputs by itself
                    self.timelines.begin(self.state.step, self.worker_groups())
                with marked_timer("step", timing):
                    self._sync_before_generation(timing)
                    batch = self.collect(rows, metrics, timing)
                    if has_segments(batch):
                        batch = self._checked("segments", batch, self.split_segments, metrics, timing)
                    batch = self._checked("infer", batch, self.infer, metrics, timing)
                    batch = self._checked("shape", batch, self.shape, metrics, timing)
                    batch = self._checked("update", batch, self.update, metrics, timing)
                    self._dump(batch, timing)
                self.state.max_step_s = max(self.state.max_step_s, timing["step"])
                self._learn(batch)
                self._validate_after_step(metrics, timing)
                self.state.unrecorded_step = self.state.step
                self._save_after_step(timing)
                self._profile_to_here(timing)
                self._finish_step(batch, metrics, timing)
                self._name_checkpoint()

    @contextmanager
    def _run(self) -> Iterator[None]:
        """Resume, keep the records of the run, and close them in every case."""
        self._take_over_changes()
        options = self.run_config.trainer
        rollout = self.run_config.actor_rollout_ref.rollout
        resumed = self._load_checkpoint()
        profiling.check_steps(self.run_config.global_profiler.steps, self.state.total_steps, resumed or 0)
        self.output = RunOutput(
            options, self.config, resumed, self.state.total_steps, metric_utils.describe_step, options.val_only
        )
        self._trackers = self.output.tracking.logger
        trace = rollout.trace
        RolloutTraceConfig.init(
            trace.project_name or options.project_name,
            trace.experiment_name or options.experiment_name,
            trace.backend,
            trace.token2text,
            max_samples_per_step=trace.max_samples_per_step_per_worker,
        )
        algorithm = self.run_config.algorithm
        veto = None if algorithm.rollout_is_threshold is None else algorithm.rollout_is_veto_threshold
        self.step_record = StepRecord(options.record_digests, options.record_samples, self.tokenizer, veto)
        self.timelines = Timelines(options.timeline_steps, self.output.folder, self.output.kept_step)
        if rollout.skip_rollout:
            RolloutSkip(self.config, self.async_rollout_manager or self.actor_rollout_wg).wrap_generate_sequences()
        CLOCK.mark("resume")
        if self._may_save:
            warn_of_lost_state(self.train_dataloader.sampler, getattr(self, "train_dataset", None))
        finished = is_asked = False
        try:
            yield
            finished = True
        except loaders.EndOfDataError as end:
            self._end_early(end)
            finished = True
        except Exception as error:  # whatever ends the run, its message names the step
            error.add_note(f"in training step {self.state.step} of {self.state.total_steps}")
            is_asked = isinstance(error, EndRequested)
            if is_asked or isinstance(error, NothingScoredError):
                self.state.step -= 1
                if is_asked or options.save_freq > 0:
                    self._save_last_full_step({})
            raise
        finally:
            profiling.end_profiling(self.state)
            flush_traces = getattr(self.async_rollout_manager, "flush_traces", None)
            if flush_traces is not None:  # a manager of a fork need not have it
                flush_traces()
            self.output.close(finished, report=not is_asked)  # else the launching process writes it

    def _training_rows(self) -> Iterator[Rows]:
        options = self.run_config.trainer
        total_epochs = options.total_epochs if options.total_training_steps is None else None
        return loaders.training_rows(self.train_dataloader, self.state, total_epochs)

    def _begin_step(self) -> None:
        """Move to the next step; keep where its data begin, for a checkpoint of the last full step."""
        if self._may_save:
            self._step_position = self.checkpoints.start_of_step()
        self.state.begin_step()
        self._end_if_requested()

    @property
    def _may_save(self) -> bool:
        options = self.run_config.trainer
        return options.save_freq > 0 or options.save_on_sigterm_s is not None

    def _end_if_requested(self) -> None:
        """End the run after the last full step if SIGTERM has asked for that.

        Raises: EndRequested.
        """
        if self._is_end_requested():
            raise EndRequested(f"SIGTERM: the run ends after step {self.state.step - 1} of {self.state.total_steps}")

    def _is_end_requested(self) -> bool:
        return self.run_config.trainer.save_on_sigterm_s is not None and is_end_requested()

    def _checked(self, name: str, batch: DataProto | None, method: Callable[..., DataProto], *args: Any) -> DataProto:
        if name in self._may_end_before:
            self._end_if_requested()
        with checked_phase(name, batch) as result:
            result.append(method(*args) if batch is None else method(batch, *args))
        self.step_record.phase(name, result[0], None if name == "prepare" else self.state.row_order)
        return result[0]

    @contextmanager
    def _timed(self, timer: str, timing: Timing) -> Iterator[None]:
        """Time a part of a step, and name it in the error if a worker dies in it."""
        with phase(_PHASE_OF_TIMER.get(timer, timer), step=self.state.step), marked_timer(timer, timing):
            yield

    # ---- phases

    def collect(self, rows: Iterator[Rows], metrics: Metrics, timing: Timing) -> DataProto:
        """Prepare, generate and score the next batch of the loader; a recipe may draw several from ``rows``."""
        batch = self._checked("prepare", None, self.prepare, next(rows))
        batch = self._checked("generate", batch, self.generate, metrics, timing)
        return self._checked("score", batch, self.score, metrics, timing)

    def prepare(self, rows: Rows) -> DataProto:
        """Turn the rows of the loader into a batch, one ``uid`` per prompt."""
        state = self.state
        if self._catches_up:
            self._catches_up = False
            self.checkpoints.after_draw()
        batch = DataProto.from_single_dict(rows)
        uids = prompt_uids(state.seed, state.step, len(batch), first_prompt=state.prompts_drawn)
        batch.non_tensor_batch["uid"] = uids
        batch.meta_info["first_prompt"] = state.prompts_drawn
        state.prompts_drawn += len(batch)
        return batch

    def generate(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Sample ``rollout.n`` responses per prompt; the rows become the responses."""
        num_samples = self.run_config.actor_rollout_ref.rollout.n
        prompts, output, seeds = self._sample(batch, metrics, timing)
        if "replace" in output.meta_info:
            batch, prompts, output, seeds = self._replace_failed(batch, prompts, output, seeds, metrics, timing)
        dropped = output.non_tensor_batch.get(DROPPED_COLUMN)
        if dropped is not None and dropped.astype(bool).all():
            raise RuntimeError(
                f"step {self.state.step}: all {len(dropped)} trajectories were dropped "
                "(actor_rollout_ref.rollout.agent.on_failure=drop), so there is nothing to learn from: see "
                "attempts.jsonl in the folder of the run for the reasons"
            )
        if self.run_config.algorithm.adv_estimator == AdvantageEstimator.REMAX:
            tensors_of(batch)["reward_baselines"] = self._greedy_baseline(batch, prompts, metrics, timing)
        later = output.non_tensor_batch.pop("__later_inputs__", None)
        batch = batch.repeat(repeat_times=num_samples, interleave=True).union(output)
        if later is not None:
            replace_inputs(batch.non_tensor_batch, later)
        tensors = tensors_of(batch)
        tensors["sampling_seed"] = seeds
        if "response_mask" not in tensors.keys():
            tensors["response_mask"] = compute_response_mask(batch)
        return self._arrange(batch, metrics)

    def _sample(self, batch: DataProto, metrics: Metrics, timing: Timing) -> tuple[DataProto, DataProto, torch.Tensor]:
        """Sample ``rollout.n`` responses per prompt; return the prompts, the responses and the seeds of these.

        The columns that the rollout reads move from ``batch`` to the prompts.
        """
        prompts, requests, seeds = self._requests(batch, metrics)
        with self._timed("gen", timing):
            output = self.rollout_wg_generate(requests)
        self._receive(requests, output, metrics, timing)
        return prompts, output, seeds

    def _requests(self, batch: DataProto, metrics: Metrics) -> tuple[DataProto, DataProto, torch.Tensor]:
        """Return the prompts, the requests for their responses, and the seeds of these.

        The columns that the rollout reads move from ``batch`` to the prompts.
        """
        num_samples = self.run_config.actor_rollout_ref.rollout.n
        prompts = self._get_gen_batch(batch)
        count_shared_bytes(prompts.non_tensor_batch, metrics)
        if self.run_config.trainer.lazy_columns:
            prompts = by_reference(prompts)
            prompts.meta_info[BY_REFERENCE] = batch.meta_info[BY_REFERENCE] = True
        prompts.meta_info["first_prompt"] = batch.meta_info.get("first_prompt", 0)
        prompts.meta_info["global_steps"] = self.state.step
        if self._loops_score(self.reward_fn):
            prompts.meta_info["score_trajectories"] = True
        if self._reward_model_need_not_wait(prompts):
            prompts.meta_info[SCORED_BY_MODEL] = True
        requests = prompts.repeat(repeat_times=num_samples, interleave=True)
        seeds = self._sampling_seeds(prompts, num_samples)
        tensors_of(requests)["sampling_seed"] = seeds
        return prompts, requests, seeds

    def _receive(self, requests: DataProto, output: DataProto, metrics: Metrics, timing: Timing) -> None:
        """Check the responses of a rollout, and move their times and metrics to those of the step."""
        self._check_rollout(requests, output)
        if not is_lazy(output) and output.tensor_bytes() >= LARGE_BATCH_BYTES:
            keep_freed_host_memory()  # each step takes such blocks again
        for name, value in output.meta_info.pop("timing", {}).items():  # several calls in a step add up
            timing[name] = value if "/" in name else timing.get(name, 0.0) + value
        found = output.meta_info.get("metrics", {})
        counts = {name: value for name, value in found.items() if name.startswith("attempts/")}
        counts = {name: metrics.get(name, 0.0) + value for name, value in counts.items()}
        without_metrics(output, metrics)
        metrics.update(counts)

    def _replace_failed(
        self,
        batch: DataProto,
        prompts: DataProto,
        output: DataProto,
        seeds: torch.Tensor,
        metrics: Metrics,
        timing: Timing,
    ) -> tuple[DataProto, DataProto, DataProto, torch.Tensor]:
        """Put spare prompts with their responses in place of the prompts that ``replace`` of the output names.

        Raises: RuntimeError when spare prompts fail again and again.
        """
        from verl.experimental.agent_loop.rows import joined

        num_samples = self.run_config.actor_rollout_ref.rollout.n
        for rounds in itertools.count():
            failed = set(output.meta_info.pop("replace", ()))
            places = [place for place, uid in enumerate(batch.non_tensor_batch["uid"]) if uid in failed]
            if not places:
                return batch, prompts, output, seeds
            if rounds == spares.MOST_ROUNDS:
                break
            spare = self.spare_prompts.draw(len(places))
            spare_prompts, spare_output, spare_seeds = self._sample(spare, metrics, timing)
            rows = spares.rows_of_prompts(places, num_samples)
            batch = spares.with_rows(batch, spare, places)
            prompts = spares.with_rows(prompts, spare_prompts, places)
            again = spare_output.meta_info.pop("replace", ())
            seeds = seeds.clone()
            seeds[rows] = spare_seeds
            kept = [row for row in range(len(output)) if row not in set(rows)]
            meta_info = output.meta_info
            output.meta_info = {}
            spare_output.meta_info = {}
            together = joined([output.select_idxs(torch.tensor(kept, dtype=torch.int64)), spare_output])
            output = together.select_idxs(torch.tensor(np.argsort([*kept, *rows], kind="stable")))
            output.meta_info = meta_info | ({"replace": again} if again else {})
        raise RuntimeError(
            f"step {self.state.step}: {len(places)} prompts were replaced {spares.MOST_ROUNDS} times, and agent loops "
            "fail for the spare ones too: see attempts.jsonl in the folder of the run for the reasons"
        )

    @cached_property
    def spare_prompts(self) -> spares.SparePrompts:
        """The prompts that replace those whose trajectories failed."""
        return spares.SparePrompts(self.train_dataset, self.train_dataloader.collate_fn, self.state)

    def score(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Start to score the responses; ``shape`` takes the scores, so that scorers may run during ``infer``."""
        with self._timed("reward", timing):
            self.state.pending_reward = self._new_reward().start(batch, metrics)
        return batch

    def split_segments(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Make a row of each segment of a trajectory whose agent loop has rewritten its history.

        The scores are there before, since reward functions see one row of each trajectory. A recipe whose loss is that
        of whole responses returns ``without_segments(batch, reason)``.
        """
        run = self.run_config
        if run.algorithm.use_pf_ppo:
            return without_segments(batch, "algorithm.use_pf_ppo draws whole responses")
        with self._timed("reward", timing):
            self._add_scores(batch, metrics)
        if len(self.state.row_order) == len(batch):  # else a fork has cut the batch
            batch.reorder(torch.tensor(self.state.row_order))  # so that the rows do not depend on the ranks
        num_trajectories = len(batch)
        rows = segment_rows(batch)
        check_rollout(rows, rows, self.state.step, single_turn=False)
        lengths = tensors_of(rows)["attention_mask"].sum(-1).tolist()
        ranks = max(1, self.actor_rollout_wg.world_size // workers_of_a_shard(run.actor_rollout_ref.actor))
        steps = math.lcm(*self._steps_of_a_pass(num_trajectories))
        divisor = steps * math.lcm(ranks, *(group.world_size for group in self.worker_groups().values()))
        trajectories = rows.non_tensor_batch[TRAJECTORY_COLUMN].tolist()
        groups = self._groups_of(rows)
        layout = arrange(trajectories, lengths, steps, ranks, divisor, run.trainer.balance_batch, groups)
        batch, self.state.row_order = placed(rows, layout)
        if run.trainer.balance_batch:
            metrics.update(balance_metrics(lengths, layout))
        metrics["segments/rows"] = len(rows)
        metrics["segments/filling_rows"] = len(batch) - len(rows)
        batch.meta_info[NUM_TRAJECTORIES] = num_trajectories
        return self._describe(batch)

    def _steps_of_a_pass(self, num_trajectories: int) -> list[int]:
        """Return for each role that trains in how many mini-batches it cuts a batch."""
        run = self.run_config
        roles = [run.actor_rollout_ref.actor] if run.critic is None else [run.actor_rollout_ref.actor, run.critic]
        rows = run.actor_rollout_ref.rollout.n
        return [max(1, num_trajectories // (role.ppo_mini_batch_size * rows)) for role in roles]

    def infer(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Compute only the log-probabilities and values that the rest of the step reads."""
        run = self.run_config
        actor = run.actor_rollout_ref.actor
        if actor.use_rollout_log_probs:
            batch = with_rollout_log_probs(batch)
        elif needs_old_log_probs(actor, run.algorithm, run.prompts_per_step):
            with self._timed("old_log_prob", timing):
                batch = self._add_old_log_probs(batch, metrics)
        if self.use_reference_policy and (not actor.uses_full_kl or run.algorithm.use_kl_in_reward):
            with self._timed("ref", timing):
                group = self.actor_rollout_wg if self.ref_in_actor else self.ref_policy_wg
                assert group is not None
                batch = batch.union(without_metrics(group.compute_ref_log_prob(for_model(batch)), metrics))
        if self.use_critic:
            assert self.critic_wg is not None
            with self._timed("values", timing):
                batch = batch.union(without_metrics(self.critic_wg.compute_values(for_model(batch)), metrics))
        return batch

    def shape(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Turn scores into rewards, advantages and returns."""
        algorithm = self.run_config.algorithm
        with self._timed("reward", timing):
            self._add_scores(batch, metrics)
        with self._timed("adv", timing):
            if algorithm.use_kl_in_reward:
                apply = partial(apply_kl_penalty, batch, self.kl_ctrl_in_reward, algorithm.kl_penalty)
                # A fork may have put a function without ``group`` in place.
                at_workers = columns.stays_with_workers(batch)
                batch, kl_metrics = apply(group=self.actor_rollout_wg) if at_workers else apply()
                metrics.update(kl_metrics)
            else:
                tensors_of(batch)["token_level_rewards"] = tensors_of(batch)["token_level_scores"].clone()
            batch, mismatch = self.compute_rollout_importance_weights_and_add_to_batch(batch)
            metrics.update(mismatch)
            return self.add_advantages(batch)

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Add ``advantages`` and ``returns`` (B, R) by the token-level rewards; the last part of ``shape``."""
        algorithm = self.run_config.algorithm
        if columns.stays_with_workers(batch):
            estimator = algorithm.adv_estimator
            return columns.add_advantages(self.actor_rollout_wg, batch, algorithm, self.config.algorithm, estimator)
        return compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=self.config.algorithm,  # an estimator of a fork may read keys that AlgoConfig does not have
            generator=torch.Generator().manual_seed(derive_seed(self.state.seed, "pf_ppo", self.state.step)),
        )

    @property
    def trains_critic_only(self) -> bool:
        """Whether the current step is one of the first ``trainer.critic_warmup``."""
        return self.state.step <= self.run_config.trainer.critic_warmup

    def update(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Update the critic, and after its warm-up the actor."""
        if self.use_critic:
            assert self.critic_wg is not None
            with self._timed("update_critic", timing):
                without_metrics(self.critic_wg.update_critic(for_model(batch)), metrics)
        if not self.trains_critic_only:
            with self._timed("update_actor", timing):
                batch.meta_info["multi_turn"] = self.run_config.actor_rollout_ref.rollout.multi_turn.enable
                without_metrics(self.actor_rollout_wg.update_actor(for_model(batch)), metrics)
            self.state.weights_version += 1
        return batch

    # ---- parts of the phases

    def _get_gen_batch(self, batch: DataProto) -> DataProto:
        """Move the columns that the rollout reads out of ``batch``; a ``uid`` is copied, to name each row."""
        # Images and their tensors go to the workers once, however often a prompt is sampled.
        share(batch.non_tensor_batch)
        columns = [name for name in batch.non_tensor_batch if name not in _SCORING_COLUMNS]
        prompts = batch.pop(["input_ids", "attention_mask", "position_ids"], non_tensor_batch_keys=columns)
        # Agent loops read the whole row, and may score it.
        shared = _SCORING_COLUMNS if self.async_rollout_mode else {"uid"}
        for name in sorted(shared & batch.non_tensor_batch.keys()):
            prompts.non_tensor_batch[name] = batch.non_tensor_batch[name]
        if "multi_modal_inputs" in columns:  # the models read it too
            batch.non_tensor_batch["multi_modal_inputs"] = prompts.non_tensor_batch["multi_modal_inputs"]
        return prompts

    def _sampling_seeds(self, prompts: DataProto, num_samples: int) -> torch.Tensor:
        """Return the seeds of the samples of prompts of this step, (num_prompts * num_samples,)."""
        first = prompts.meta_info["first_prompt"]
        return sampling_seeds(self.state.seed, self.state.step, len(prompts), num_samples, first_prompt=first)

    def _arrange(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Order the rows of a batch for the ranks; ``state.row_order`` says how to put them back."""
        self.state.row_order = list(range(len(batch)))
        if self.run_config.trainer.balance_batch:
            self._balance_batch(batch, metrics)
        return self._describe(batch)

    def _describe(self, batch: DataProto) -> DataProto:
        """Say in ``meta_info`` what workers count."""
        batch.meta_info["global_steps"] = self.state.step
        batch.meta_info["global_token_num"] = tensors_of(batch)["attention_mask"].sum(-1).tolist()
        batch.meta_info["images_seqlens"] = image_lengths(batch.non_tensor_batch.get("multi_modal_inputs", ()))
        return batch

    def _check_rollout(self, requests: DataProto, output: DataProto) -> None:
        """Check a rollout where its columns are."""
        if is_lazy(output):
            group = self.actor_rollout_wg
            columns.describe_rollout(group, requests, output, self.state.step, self.single_turn)
        else:
            check_rollout(requests, output, self.state.step, self.single_turn)

    def _generate_padded(self, requests: DataProto) -> DataProto:
        """Generate for any number of requests, and drop the timers and metrics of the rollout."""
        padded, pad_size = pad_dataproto_to_divisor(requests, self.actor_rollout_wg.world_size)
        output = unpad_dataproto(self.rollout_wg_generate(padded), pad_size=pad_size)
        self._check_rollout(requests, output)
        output.non_tensor_batch.pop("__later_inputs__", None)  # of images of later turns; only training reads them
        output.meta_info.pop("timing", None)
        output.meta_info.pop("metrics", None)
        return output

    def _greedy_baseline(self, batch: DataProto, prompts: DataProto, metrics: Metrics, timing: Timing) -> torch.Tensor:
        """Return the score of one greedy response per prompt, (num_prompts,), as ReMax subtracts it.

        The metrics of its scoring, except ``perf/``, get the prefix ``greedy/``.
        """
        requests = prompts.repeat(repeat_times=1)
        requests.meta_info = {**prompts.meta_info, "do_sample": False, SCORED_BY_MODEL: False}
        tensors_of(requests)["sampling_seed"] = self._sampling_seeds(prompts, 1)
        with self._timed("gen_max", timing):
            greedy = batch.repeat(repeat_times=1).union(self._generate_padded(requests))
            found: Metrics = {}
            scores, extras = self._new_reward().start(greedy, found).take(greedy, found)
        found |= metric_utils.failure_metrics("reward", extras.get(FAILURE_COLUMN))
        metrics |= {f"greedy/{name}": value for name, value in found.items() if not name.startswith("perf/")}
        unknown = torch.tensor([reason == UNAVAILABLE for reason in extras.get(FAILURE_COLUMN, [None] * len(greedy))])
        return scores.sum(dim=-1).masked_fill(unknown, torch.nan)  # the responses of such a prompt are not trained

    def _loops_score(self, reward_fn: RewardFn | None) -> bool:
        """Whether agent loops score their trajectories: with a rule that judges each by itself."""
        if not self.async_rollout_mode or self.use_rm or self.run_config.actor_rollout_ref.rollout.skip_rollout:
            return False  # a rollout that was kept may be scored by another rule
        from verl.experimental.agent_loop.rewards import scores_one_by_one

        return scores_one_by_one(reward_fn)

    def _reward_model_need_not_wait(self, prompts: DataProto) -> bool:
        """Whether a reward model with its own devices scores responses while agent loops generate the others.

        Images of later turns are not known before the whole batch is there.
        """
        return (
            self.async_rollout_mode
            and self.use_rm
            and self.run_config.reward_model.enable_resource_pool
            and hasattr(self.rm_wg, "start_rm_score")  # the reward model of a recipe may be another kind of worker
            and not self.run_config.actor_rollout_ref.rollout.skip_rollout
            and "multi_modal_inputs" not in prompts.non_tensor_batch
        )

    def _new_reward(self) -> PendingReward:
        assert self.reward_fn is not None, "training needs reward_fn"
        options = self.run_config.reward_model
        return PendingReward(
            self.reward_fn,
            self.rm_wg if self.use_rm else None,
            own_pool=options.enable_resource_pool,
            in_task=options.launch_reward_fn_async,
            # On CPU every core may belong to a worker: a task that asks for one would never start.
            num_cpus=0 if self.device_name == "cpu" else 1,
            timeout_s=self.run_config.trainer.worker_call_timeout_s,
        )

    def _balance_batch(self, batch: DataProto, metrics: Metrics, logging_prefix: str = "global_seqlen") -> None:
        """Reorder the rows so that every rank gets about the same number of tokens."""
        lengths = tensors_of(batch)["attention_mask"].sum(-1).tolist()
        # The rows need not be a multiple of the workers, since some workers share rows. Their greatest common divisor
        # is a multiple of the workers that do not share.
        parts = math.gcd(len(lengths), self.actor_rollout_wg.world_size)
        partitions = self._keep_groups(batch, get_seqlen_balanced_partitions(lengths, parts, equal_size=True))
        order = [row for part in partitions for row in part]
        batch.reorder(torch.tensor(order))
        self.state.row_order = np.argsort(order).tolist()
        metrics.update(log_seqlen_unbalance(lengths, partitions, prefix=logging_prefix))

    def _groups_of(self, batch: DataProto) -> Groups | None:
        """Return the samples of each prompt, if the roles compute a prompt once for the samples that a rank has.

        None where rows are shuffled, or trained in other mini-batches by the critic.
        """
        run = self.run_config
        actor = run.actor_rollout_ref.actor
        critic = run.critic
        model = run.actor_rollout_ref.model
        shares = model.use_prefix_sharing and packs_rows(actor.strategy, model.use_remove_padding)
        if not shares or actor.shuffle or "uid" not in batch.non_tensor_batch:
            return None
        if critic is not None and (critic.shuffle or workers_of_a_shard(critic) != workers_of_a_shard(actor)):
            return None
        prompts, responses = lengths_of(batch)
        return Groups(batch.non_tensor_batch["uid"].tolist(), prompts.tolist(), responses.tolist())

    def _keep_groups(self, batch: DataProto, parts: Partition) -> Partition:
        """Give the samples of a prompt to one rank where that saves computing their prompt again."""
        run = self.run_config
        actor = run.actor_rollout_ref.actor
        critic = run.critic
        shards = self.actor_rollout_wg.world_size // workers_of_a_shard(actor)
        # Workers that share a shard may have one part between them, where the rows do not divide over all workers.
        sharing, rest = divmod(len(parts), shards)
        groups = self._groups_of(batch) if shards > 1 and not rest else None
        if groups is None:
            return parts
        ranks = [[row for part in parts[at : at + sharing] for row in part] for at in range(0, len(parts), sharing)]
        roles = [actor] if critic is None else [actor, critic]
        rows = [role.ppo_mini_batch_size * run.actor_rollout_ref.rollout.n // len(ranks) for role in roles]
        placed = keep_groups(ranks, groups, math.gcd(len(ranks[0]), *rows))
        width = len(parts[0])
        return [part[at : at + width] for part in placed for at in range(0, len(part), width)]

    def _add_old_log_probs(self, batch: DataProto, metrics: Metrics) -> DataProto:
        actor = self.run_config.actor_rollout_ref.actor
        output = without_metrics(self.actor_rollout_wg.compute_log_prob(for_model(batch)), metrics)
        entropies = tensors_of(output).pop("entropys")
        assert isinstance(entropies, torch.Tensor)
        batch = batch.union(output)
        mode = actor.loss_agg_mode
        length = actor.loss_scale_factor
        metrics.update(columns.log_prob_metrics(self.actor_rollout_wg, batch, entropies, mode, length))
        return batch

    def compute_rollout_importance_weights_and_add_to_batch(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Return the batch, with importance weights if the loss uses them, and metrics of the mismatch of the rollout.

        Raises: ValueError when the loss uses them and the rollout returned no log-probabilities.
        """
        algorithm = self.run_config.algorithm
        can_weigh = algorithm.rollout_is_threshold is not None and "rollout_log_probs" in tensors_of(batch).keys()
        if can_weigh and columns.stays_with_workers(batch):
            return columns.add_rollout_weights(self.actor_rollout_wg, batch, algorithm)
        return add_rollout_weights(batch, algorithm)

    def _add_scores(self, batch: DataProto, metrics: Metrics) -> None:
        """Wait for the reward that ``score`` started, and add scores and extras to the batch; once per batch."""
        pending = self.state.pending_reward
        self.state.pending_reward = None
        if pending is None:
            return
        scores, extras = pending.take(batch, metrics)
        tensors_of(batch)["token_level_scores"] = scores
        self.state.extra_columns = list(extras)
        for name, values in extras.items():  # one axis: lists among the values stay lists
            batch.non_tensor_batch[name] = np.fromiter(values, dtype=object, count=len(values))
        refuse_nothing_scored(batch, self.state.step, self.reward_fn)
        leave_unscored_out(batch, self.actor_rollout_wg, self.state.step)

    # ---- after the phases of a step

    def _learn(self, batch: DataProto) -> None:
        """Let sampler and data set learn from the step, also from the last one: checkpoints hold what they know."""
        sampler = getattr(self.train_dataloader, "sampler", None)  # a fork may have another loader
        dataset = getattr(self, "train_dataset", None)
        for learner, method in ((sampler, "update"), (dataset, "on_batch_end")):
            if hasattr(learner, method):
                getattr(learner, method)(batch=per_trajectory(batch).select())

    def _dump(self, batch: DataProto, timing: Timing) -> None:
        folder = self.run_config.trainer.rollout_data_dir
        if folder:
            if SEGMENTS_COLUMN in batch.non_tensor_batch:  # one line for each trajectory
                batch = per_trajectory(batch.select_idxs(self.state.row_order))
            extras = {name: list(batch.non_tensor_batch[name]) for name in self.state.extra_columns}
            self._log_rollout_data(batch, extras, timing, folder)

    def _log_rollout_data(
        self, batch: DataProto, reward_extra_infos_dict: ExtraColumns, timing_raw: Timing, rollout_data_dir: str
    ) -> None:
        """Write the responses of a scored batch to the folder, in the order in which they were asked for."""
        with marked_timer("dump_rollout_generations", timing_raw):
            order = self.state.row_order
            if len(order) != len(batch):  # a fork may have cut the batch
                order = list(range(len(batch)))
            columns = scored_columns(batch, self.tokenizer, reward_extra_infos_dict, order)
            self._dump_generations(**columns, dump_path=rollout_data_dir)

    def _dump_generations(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        gts: Sequence[Any],
        scores: Sequence[float],
        reward_extra_infos_dict: Mapping[str, Sequence[Any]],
        dump_path: str,
    ) -> None:
        """Write samples to ``<dump_path>/<step>.jsonl``."""
        dump_generations(dump_path, self.state.step, inputs, outputs, gts, scores, reward_extra_infos_dict)

    def _finish_step(self, batch: DataProto, metrics: Metrics, timing: Timing) -> None:
        """Compute and publish the metrics of the step."""
        state = self.state
        self.step_record.ask_workers(self.worker_groups())
        metrics["training/global_step"] = state.step
        metrics["training/epoch"] = state.epoch
        tokens = None
        if columns.stays_with_workers(batch):
            tokens = columns.token_metrics(self.actor_rollout_wg, metric_utils.without_dropped(batch), self.use_critic)
        metrics.update(metric_utils.compute_data_metrics(batch, use_critic=self.use_critic, token_metrics=tokens))
        metrics.update(metric_utils.compute_timing_metrics(batch, timing))
        workers = self.resource_pool_manager.get_n_gpus()
        metrics.update(metric_utils.compute_throughput_metrics(batch, timing, workers))
        CLOCK.mark("first_step")
        metrics.update(CLOCK.report())
        if not self._loops_score(self.reward_fn):  # else they have traced the scores, with each turn
            trajectories = per_trajectory(batch)
            scores = tensors_of(trajectories)["token_level_scores"].sum(-1)
            trace_batch(trajectories, scores, state.step, self.tokenizer)
        details = self.step_record.finish(batch, metrics)
        if self.run_config.trainer.lazy_columns:
            metrics["driver/column_bytes"] = float(sum(take_touched().values()))
        self.output.log(metrics, state.step, details, finished=True)
        if self.timelines is not None:
            self.timelines.finish(state.step, self._recorded())
        profiler = self.run_config.global_profiler
        profiling.dump_memory(profiler.tool, profiler.steps, state.step, self.actor_rollout_wg)

    def _recorded(self) -> list[Part]:
        """Return what workers and agent loops have recorded for the timeline of the step."""
        take = getattr(self.async_rollout_manager, "take_timeline", None)
        return [*self.step_record.parts, *(take() if take is not None else ())]

    def _end_early(self, reason: loaders.EndOfDataError) -> None:
        """Validate and save the last full step, if the data end before the planned number of steps.

        Raises: ``reason`` if there is no full step.
        """
        state = self.state
        options = self.run_config.trainer
        state.step -= 1  # the step that could not be filled
        if not state.step:
            raise reason
        planned = state.total_steps
        state.total_steps = state.step
        logger.warning("the run ends after step %d of at most %d: %s", state.step, planned, reason)
        metrics: Metrics = {}
        timing: Timing = {}
        if options.test_freq > 0 and state.step % options.test_freq:
            self._validate_after_step(metrics, timing)
        if options.save_freq > 0:
            self._save_last_full_step(timing)
        metrics |= {f"timing_s/{name}": seconds for name, seconds in timing.items()}
        self.output.log(metrics, state.step)

    def _save_last_full_step(self, timing: Timing) -> None:
        """Save the step before one that has not become full, which a resumed run draws again."""
        state = self.state
        if not state.step:
            return
        if self.checkpoints.newest_step != state.step:
            self.checkpoints.goes_on_at = self._step_position
            with self._timed("save_checkpoint", timing):
                self._save_checkpoint()
        self.checkpoints.finish()

    # ---- validation

    def _validate_before_training(self) -> bool:
        """Validate the starting weights if the configuration asks for it; return whether the run ends there."""
        options = self.run_config.trainer
        if not (options.val_before_train or options.val_only):
            return False
        with phase("validate", step=self.state.step):
            metrics = self._validate()
        CLOCK.mark("validation")
        if metrics:  # empty if a reward model judges the rows: they have no ground truth
            self.output.log(metrics, self.state.step)
        return bool(options.val_only)

    def _validate_after_step(self, metrics: Metrics, timing: Timing) -> None:
        """Validate every ``trainer.test_freq`` steps and after the last one."""
        frequency = self.run_config.trainer.test_freq
        if frequency > 0 and (self.state.is_last_step or self.state.step % frequency == 0):
            if self._is_end_requested():
                logger.warning("step %d is not validated: the run saves it and ends", self.state.step)
                return
            with self._timed("testing", timing):
                metrics.update(self._validate())

    def _validate(self) -> Metrics:
        """Return the metrics of the current weights on the validation set."""
        options = self.run_config.trainer
        if self.val_dataloader is None:
            raise WrongInput("data.val_files=null: name a file, or set trainer.val_before_train=false and test_freq=-1")
        samples = collect_samples(
            self.val_dataloader,
            self._generate_for_validation,
            self.val_reward_fn,
            self.tokenizer,
            self.state.step,
            with_reward_model=self.use_rm,
            reward_fn_key=self.run_config.data.reward_fn_key,
        )
        if samples is None:
            return {}
        self._maybe_log_val_generations(inputs=samples.inputs, outputs=samples.shown, scores=samples.scores)
        if options.validation_data_dir:
            self._dump_generations(
                inputs=samples.inputs,
                outputs=samples.outputs,
                gts=samples.truths,
                scores=samples.scores,
                reward_extra_infos_dict=samples.columns,
                dump_path=options.validation_data_dir,
            )
        return summarise(samples)

    def _maybe_log_val_generations(
        self, inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float]
    ) -> None:
        """Show ``trainer.log_val_generations`` of the samples in the trackers that can."""
        options = self.run_config.trainer
        if options.log_val_generations > 0:
            self.log_val_generations(choose_samples(inputs, outputs, scores, options.log_val_generations))

    def log_val_generations(self, rows: list[tuple[str, str, float]]) -> None:
        """Show validation samples in the trackers that can."""
        log_generations(self.validation_generations_logger, self._trackers, rows, self.state.step)

    def _generate_for_validation(self, prompts: DataProto, first_prompt: int) -> DataProto:
        """Return ``val_kwargs.n`` responses to each prompt."""
        sampling = self.run_config.actor_rollout_ref.rollout.val_kwargs
        batch, seeds = repeat_prompts(prompts, sampling.n, self.state.seed, self.state.step, first_prompt)
        requests = self._get_gen_batch(batch)
        tensors_of(requests)["sampling_seed"] = seeds
        requests.meta_info = {  # as in training, the worker adds eos_token_id and pad_token_id of the model
            "recompute_log_prob": False,
            "do_sample": sampling.do_sample,
            "validate": True,
            "global_steps": self.state.step,
            STAYS_AWAKE: prompts.meta_info.get(STAYS_AWAKE, False),
        }
        if self._loops_score(self.val_reward_fn):
            requests.meta_info["score_trajectories"] = True
        batch = batch.union(self._generate_padded(requests))
        batch.meta_info["validate"] = True
        return batch

    # ---- checkpoints and profiling

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the worker groups that train."""
        groups = self.trained_groups()
        learners = {"train_dataset": getattr(self, "train_dataset", None), "reward_fn": self.reward_fn}
        return Checkpoints(
            self.run_config,
            self.state,
            groups,
            self.train_dataloader,
            self.kl_ctrl_in_reward,
            learners,
            reference_fields(self.run_config.actor_rollout_ref),
        )

    def trained_groups(self) -> dict[str, RayWorkerGroup]:
        """Return the worker groups that train, by the folder that each has in a checkpoint."""
        groups = {name: group for name, group in self.worker_groups().items() if name in ("actor_rollout", "critic")}
        return {name.removesuffix("_rollout"): group for name, group in groups.items()}

    def _save_after_step(self, timing: Timing) -> None:
        """Write a checkpoint every ``trainer.save_freq`` steps, after the last one, and before capacity expires."""
        if self.run_config.trainer.save_freq <= 0:
            return
        self.checkpoints.finish(wait=self.state.is_last_step)
        if self.checkpoints.is_due():
            with self._timed("save_checkpoint", timing):
                self._save_checkpoint()

    def _name_checkpoint(self) -> None:
        """Let the tracker name the checkpoint of the step, which now stands in the record.

        A run that dies before this continues from an earlier checkpoint, and records the step then.
        """
        self.state.unrecorded_step = None
        if self.state.unfinished_checkpoint is not None:
            self.checkpoints.finish(wait=self.state.is_last_step)

    def _save_checkpoint(self) -> None:
        """Write all parts of a checkpoint, and last the file that names it."""
        self.checkpoints.save()

    def _load_checkpoint(self) -> int | None:
        """Restore the run that the configuration resumes; return its step, None for a fresh start."""
        options = self.run_config.trainer
        folder = find_resume_folder(self.run_config)
        if folder is not None:
            self.checkpoints.load(folder, delete_after_load=options.del_local_ckpt_after_load)
            self._catches_up = True
        if not options.val_only:
            name_start(run_folder(self.run_config), folder)
        return None if folder is None else self.state.step

    def _profile_from_here(self, timing: Timing) -> None:
        """Start the profilers of the roles, if this step is listed and they do not run on from the one before."""
        if profiling.starts_profiling(self.run_config.global_profiler, self.state):
            with marked_timer("start_profile", timing):
                self._start_profiling(True)

    def _profile_to_here(self, timing: Timing) -> None:
        """Stop the profilers of the roles, unless they run on into the next step."""
        if profiling.stops_profiling(self.run_config.global_profiler, self.state):
            with marked_timer("stop_profile", timing):
                self._stop_profiling(True)
                profiling.finish_profiling(self.run_config.global_profiler, self.state, self.worker_groups())

    def _start_profiling(self, do_profile: bool) -> None:
        """Start the profilers of the roles."""
        if do_profile:
            profiling.start_profiling(self.state, self.worker_groups())

    def _stop_profiling(self, do_profile: bool) -> None:
        """Stop the profilers of the roles."""
        if do_profile:
            profiling.stop_profiling(self.state)


def without_metrics(output: DataProto, metrics: Metrics) -> DataProto:
    """Move the metrics of a workers' answer to those of the step, and return the rest."""
    metrics.update(reduce_metrics(output.meta_info.pop("metrics", {})))
    return output


def for_model(batch: DataProto) -> DataProto:
    """Select the part of a batch that models read: tensors, multi-modal inputs and meta_info."""
    columns = [name for name in ("multi_modal_inputs",) if name in batch.non_tensor_batch]
    return batch.select(non_tensor_batch_keys=columns)
