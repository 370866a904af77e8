"""The training loop: a driver that holds metadata and small tensors, and worker groups that hold the weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cached_property, partial
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from omegaconf import DictConfig
from torch.utils.data import Dataset, Sampler
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from verl.algos.kl import get_kl_controller
from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import is_lazy
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import loaders, profiling, validation
from verl.trainer.ppo.checkpoint import Checkpoints, reference_fields
from verl.trainer.ppo.course import Course
from verl.trainer.ppo.grouping import balanced_order
from verl.trainer.ppo.metric_utils import (  # noqa: F401 (forks import these from here)
    compute_data_metrics,
    compute_throughout_metrics,
    compute_timing_metrics,
    log_prob_metrics,
    process_validation_metrics,
)
from verl.trainer.ppo.phases import checked_phase, needs_old_log_probs
from verl.trainer.ppo.records import dump_generations, dumped_rows, scored_columns
from verl.trainer.ppo.resources import (
    ResourcePoolManager,
    WorkerClasses,
    build_models,
    create_worker_groups,
    planned_steps,
)
from verl.trainer.ppo.reward import ExtraColumns, PendingReward, RewardFn, add_scores, new_reward
from verl.trainer.ppo.rollouts import (
    Rollouts,
    Sampled,
    described,
    for_model,
    needs_greedy_baseline,
    refuse_all_dropped,
    start_agent_loops,
    take_prompts,
    with_responses,
    without_metrics,
)
from verl.trainer.ppo.run_records import RunRecords
from verl.trainer.ppo.segments import has_segments, rows_for_ranks, without_segments
from verl.trainer.ppo.shaping import (
    Reader,
    add_rollout_weights,
    apply_kl_penalty,
    compute_advantage,
    compute_response_mask,  # noqa: F401 (forks import it from here)
    with_rollout_log_probs,
)
from verl.trainer.ppo.spares import SparePrompts, replace_failed
from verl.trainer.ppo.state import Metrics, OfState, RunState, Timing, timed
from verl.trainer.ppo.utils import Role, need_reference_policy, need_reward_model  # noqa: F401 (forks import Role)
from verl.trainer.run.clock import CLOCK
from verl.utils.json_types import Json
from verl.utils.numerics.seeding import prompt_uids
from verl.utils.observe.tracking import Trackers, ValidationGenerationsLogger
from verl.utils.profiler import marked_timer

if TYPE_CHECKING:
    from verl.experimental.agent_loop import AgentLoopManager


T = TypeVar("T")


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
    use_rm: bool = False
    reward_fn: RewardFn | None = None
    val_reward_fn: RewardFn | None = None
    train_dataset: Dataset[loaders.Rows] | None = None

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
        train_dataset: Dataset[loaders.Rows] | None = None,
        val_dataset: Dataset[loaders.Rows] | None = None,
        collate_fn: loaders.CollateFn | None = None,
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
        self.state = RunState(seed=run.trainer.seed)
        self._create_dataloader(train_dataset, val_dataset, collate_fn, train_sampler)

    records: RunRecords | None = None
    """The records and metrics of each step of ``fit``; None in the training loop of a user's fork of verl."""
    course: Course | None = None
    """Decides when ``fit`` validates, saves and ends; None in the training loop of a user's fork of verl."""
    _may_end_before: tuple[str, ...] = ("score", "infer", "shape")
    """Phases before which a step may end: until then it changes nothing that a checkpoint of the last step holds."""
    _scores_while_generating = True
    """Whether a reward model with its own devices may score responses while others are generated."""
    async_rollout_mode = False
    async_rollout_manager: "AgentLoopManager | None" = None

    # ---- established names for parts of the state

    global_steps = OfState[int]("step")
    total_training_steps = OfState[int]("total_steps")
    max_steps_duration = OfState[float]("max_step_s")
    run_seed = OfState[int]("seed")
    """Seed of the run, from which a recipe derives its own (``derive_seed``)."""
    is_last_step = OfState[bool]("is_last_step")

    # ---- the parts of a run

    def _create_dataloader(
        self,
        train_dataset: Dataset[loaders.Rows] | None,
        val_dataset: Dataset[loaders.Rows] | None,
        collate_fn: loaders.CollateFn | None,
        train_sampler: Sampler[int] | None,
    ) -> None:
        """Make the loaders, build the data sets and the sampler that were not given, and count the steps."""
        data = loaders.build_data(
            self.config,
            self.run_config.data,
            self.state.seed,
            self.tokenizer,
            self.processor,
            loaders.GivenData(train_dataset, val_dataset, collate_fn, train_sampler),
        )
        self.train_dataset = data.train_dataset
        self.val_dataset = data.val_dataset
        self.train_dataloader = data.train_loader
        self.val_dataloader = data.val_loader
        self.state.total_steps = planned_steps(self.config, self.run_config, len(self.train_dataloader))
        profiling.check_steps(self.run_config.global_profiler.steps, self.state.total_steps)

    def init_workers(self, groups: Mapping[str, RayWorkerGroup] | None = None) -> None:
        """Build the models on the given worker groups, or start worker groups first."""
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
        trained = {name: group for name, group in groups.items() if not (name == "ref" and self.ref_in_actor)}
        build_models(trained)
        self.rollouts.wait_until_ready()

    def _take_over_changes(self) -> None:
        """Parse the configuration again, because a user's fork might have changed ``config``."""
        self.run_config = RunConfig.parse(self.config)
        self.__dict__.pop("checkpoints", None)  # the old ones hold the old configuration

    def _start_agent_loops(self) -> None:
        """Start the actors that run agent loops, if the rollout serves; they import while the models are built."""
        if not self.run_config.actor_rollout_ref.rollout.serves:
            return
        self.async_rollout_mode = True
        self.async_rollout_manager = start_agent_loops(self.config, self.actor_rollout_wg, self.rm_wg)

    def worker_groups(self) -> dict[str, RayWorkerGroup]:
        """Return the worker groups of the run by name."""
        groups = {
            "actor_rollout": self.actor_rollout_wg,
            "ref": None if self.ref_in_actor else self.ref_policy_wg,
            "critic": self.critic_wg,
            "rm": self.rm_wg,
        }
        return {name: group for name, group in groups.items() if group is not None}

    def trained_groups(self) -> dict[str, RayWorkerGroup]:
        """Return the worker groups that train, by the folder that each has in a checkpoint."""
        groups = {name: group for name, group in self.worker_groups().items() if name in ("actor_rollout", "critic")}
        return {name.removesuffix("_rollout"): group for name, group in groups.items()}

    @property
    def rollouts(self) -> Rollouts:
        """The rollout of the run."""
        return Rollouts(
            self.run_config,
            self.state,
            self.actor_rollout_wg,
            self.async_rollout_manager,
            self._get_gen_batch,
            self.rm_wg if self.use_rm else None,
            self._scores_while_generating,
            None if self.records is None else self.records.log_attempts,
        )

    @cached_property
    def spare_prompts(self) -> SparePrompts:
        """The prompts that replace those whose trajectories failed."""
        assert self.train_dataset is not None
        return SparePrompts(self.train_dataset, self.train_dataloader.collate_fn, self.state)

    @cached_property
    def checkpoints(self) -> Checkpoints:
        """The checkpoints of the worker groups that train."""
        return Checkpoints(
            self.run_config,
            self.state,
            self.trained_groups(),
            self.train_dataloader,
            self.kl_ctrl_in_reward,
            {"train_dataset": self.train_dataset, "reward_fn": self.reward_fn},
            reference_fields(self.run_config.actor_rollout_ref),
        )

    def _load_checkpoint(self) -> int | None:
        """Restore the run that the configuration resumes; return its step, None for a fresh start."""
        return self.checkpoints.resume()

    def _save_checkpoint(self) -> None:
        """Write all parts of a checkpoint, and last the file that names it."""
        self.checkpoints.save()

    # ---- the loop

    def fit(self) -> None:
        """Train until the last step."""
        with self._run() as course:
            if course.ends_after_first_validation():
                return
            rows = self._training_rows()
            while not self.state.is_last_step:
                course.begin_step()
                metrics: Metrics = {}
                timing: Timing = {}
                with self._watched(timing):
                    with marked_timer("step", timing):
                        self._sync_before_generation(timing)
                        batch = self.collect(rows, metrics, timing)
                        if has_segments(batch):
                            batch = self._checked("segments", batch, self.split_segments, metrics, timing)
                        batch = self._checked("infer", batch, self.infer, metrics, timing)
                        batch = self._checked("shape", batch, self.shape, metrics, timing)
                        batch = self._checked("update", batch, self.update, metrics, timing)
                        self._dump(batch, timing)
                    loaders.let_learn(self.train_dataloader, self.train_dataset, batch)
                    course.validate(metrics, timing)
                    course.save(timing)
                self._finish_step(batch, metrics, timing)
                course.step_is_recorded()

    @contextmanager
    def _run(self) -> Iterator[Course]:
        """Resume, keep the records of the run, and close them in every case."""
        self._take_over_changes()
        resumed = self._load_checkpoint()
        profiling.check_steps(self.run_config.global_profiler.steps, self.state.total_steps, resumed or 0)
        with RunRecords(self.run_config, self.config, self.state, resumed, self.tokenizer) as self.records:
            self._trackers = self.records.output.tracking.logger
            self.rollouts.skip(self.config)
            CLOCK.mark("resume")
            self.course = Course(
                self.run_config,
                self.state,
                self.checkpoints,
                self._validate,
                self._save_checkpoint,
                self.records.output.log,
                self._may_end_before,
            )
            try:
                with self.course.to_the_end():
                    yield self.course
            finally:
                profiling.end_profiling(self.state)
                self.rollouts.flush_traces()

    def _training_rows(self) -> Iterator[loaders.Rows]:
        options = self.run_config.trainer
        total_epochs = options.total_epochs if options.total_training_steps is None else None
        rows = loaders.training_rows(self.train_dataloader, self.state, total_epochs)
        return rows if self.state.restored_from is None else self.checkpoints.caught_up(rows)

    def _sync_before_generation(self, timing: Timing) -> None:
        """Bring the rollout engine up to date before ``collect``; a recipe may do it at another time."""
        with self._timed("gen", timing):
            self.sync_weights()

    def sync_weights(self) -> None:
        """Bring the weights of the rollout engine up to date; do nothing when the versions agree.

        The engine then stays awake until it has generated. So ``fit`` calls this only before it generates, and after
        validation and checkpoint, which need the memory. A loop without this call is right too: the workers sync by
        themselves when they generate with an engine that is behind.
        """
        self.rollouts.sync_weights()

    def _checked(self, name: str, batch: DataProto | None, method: Callable[..., DataProto], *args: T) -> DataProto:
        if self.course is not None:
            self.course.before(name)
        with checked_phase(name, batch) as result:
            result.append(method(*args) if batch is None else method(batch, *args))
        if self.records is not None:
            self.records.phase(name, result[0])
        return result[0]

    def _timed(self, timer: str, timing: Timing) -> AbstractContextManager[None]:
        """Time a part of a step; if a worker dies within it, the error names the part."""
        return timed(timer, timing, self.state.step)

    # ---- phases

    def collect(self, rows: Iterator[loaders.Rows], metrics: Metrics, timing: Timing) -> DataProto:
        """Prepare, generate and score the next batch of the loader; a recipe may draw several from ``rows``."""
        batch = self._checked("prepare", None, self.prepare, next(rows))
        batch = self._checked("generate", batch, self.generate, metrics, timing)
        return self._checked("score", batch, self.score, metrics, timing)

    def prepare(self, rows: loaders.Rows) -> DataProto:
        """Turn the rows of the loader into a batch, one ``uid`` per prompt."""
        state = self.state
        batch = DataProto.from_single_dict(rows)
        uids = prompt_uids(state.seed, state.step, len(batch), first_prompt=state.prompts_drawn)
        batch.non_tensor_batch["uid"] = uids
        batch.meta_info["first_prompt"] = state.prompts_drawn
        state.prompts_drawn += len(batch)
        return batch

    def generate(self, batch: DataProto, metrics: Metrics, timing: Timing) -> DataProto:
        """Sample ``rollout.n`` responses per prompt; the rows become the responses."""
        num_samples = self.run_config.actor_rollout_ref.rollout.n
        sampled = self._sample(batch, metrics, timing)
        if "replace" in sampled[1].meta_info:
            sample = partial(self._sample, metrics=metrics, timing=timing)
            batch, sampled = replace_failed(batch, sampled, self.spare_prompts, sample, num_samples, self.state.step)
        prompts, output, seeds = sampled
        refuse_all_dropped(output, self.state.step)
        if needs_greedy_baseline(self.run_config):
            baseline = self.rollouts.greedy_baseline(batch, prompts, self._new_reward(), metrics, timing)
            tensors_of(batch)["reward_baselines"] = baseline
        return self._arrange(with_responses(batch, output, num_samples, seeds), metrics)

    def _sample(self, batch: DataProto, metrics: Metrics, timing: Timing) -> Sampled:
        """Sample ``rollout.n`` responses per prompt, as ``Rollouts.sample``."""
        return self.rollouts.sample(batch, self.reward_fn, metrics, timing)

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
        if len(self.state.row_order) == len(batch):  # false if a user's fork has cut the batch
            batch.reorder(torch.tensor(self.state.row_order))  # so that the rows do not depend on the ranks
        workers = [group.world_size for group in self.worker_groups().values()]
        batch, self.state.row_order, found = rows_for_ranks(
            batch, run, self.state.step, self.actor_rollout_wg.world_size, workers
        )
        metrics.update(found)
        return described(batch, self.state.step)

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
                kl_ctrl = self.kl_ctrl_in_reward
                batch, found = apply_kl_penalty(batch, kl_ctrl, algorithm.kl_penalty, **self._reader(batch))
                metrics.update(found)
            else:
                tensors_of(batch)["token_level_rewards"] = tensors_of(batch)["token_level_scores"].clone()
            batch, mismatch = self.compute_rollout_importance_weights_and_add_to_batch(batch)
            metrics.update(mismatch)
            return self.add_advantages(batch)

    def add_advantages(self, batch: DataProto) -> DataProto:
        """Add ``advantages`` and ``returns`` (B, R) by the token-level rewards; the last part of ``shape``."""
        algorithm = self.run_config.algorithm
        return compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            norm_adv_by_std_in_grpo=algorithm.norm_adv_by_std_in_grpo,
            config=self.config.algorithm,  # an estimator of a fork may read keys that AlgoConfig does not have
            generator=self.state.generator("pf_ppo"),
            **self._reader(batch),
        )

    def _reader(self, batch: DataProto) -> Reader:
        """Return the argument that names the workers that read columns by reference; none for a plain batch.

        The function of a user's fork might not have this parameter.
        """
        return {"group": self.actor_rollout_wg} if is_lazy(batch) else {}

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
        return take_prompts(batch, with_scoring_columns=self.async_rollout_mode)

    def _arrange(self, batch: DataProto, metrics: Metrics) -> DataProto:
        """Order the rows of a batch for the ranks; ``state.row_order`` is the order that undoes it."""
        self.state.row_order = list(range(len(batch)))
        if self.run_config.trainer.balance_batch:
            self._balance_batch(batch, metrics)
        return described(batch, self.state.step)

    def _new_reward(self) -> PendingReward:
        assert self.reward_fn is not None, "training needs reward_fn"
        return new_reward(self.run_config, self.reward_fn, self.rm_wg if self.use_rm else None, self.device_name)

    def _balance_batch(self, batch: DataProto, metrics: Metrics, logging_prefix: str = "global_seqlen") -> None:
        """Reorder the rows so that every rank gets about the same number of tokens."""
        order, found = balanced_order(batch, self.run_config, self.actor_rollout_wg.world_size, logging_prefix)
        batch.reorder(torch.tensor(order))
        self.state.row_order = np.argsort(order).tolist()
        metrics.update(found)

    def _add_old_log_probs(self, batch: DataProto, metrics: Metrics) -> DataProto:
        actor = self.run_config.actor_rollout_ref.actor
        output = without_metrics(self.actor_rollout_wg.compute_log_prob(for_model(batch)), metrics)
        entropies = tensors_of(output).pop("entropys")
        assert isinstance(entropies, torch.Tensor)
        batch = batch.union(output)
        group = self.actor_rollout_wg
        metrics.update(log_prob_metrics(batch, entropies, actor.loss_agg_mode, actor.loss_scale_factor, group))
        return batch

    def compute_rollout_importance_weights_and_add_to_batch(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Return the batch, with importance weights if the loss uses them, and metrics of the mismatch of the rollout.

        Raises: ValueError when the loss uses them and the rollout returned no log-probabilities.
        """
        return add_rollout_weights(batch, self.run_config.algorithm, **self._reader(batch))

    def _add_scores(self, batch: DataProto, metrics: Metrics) -> None:
        """Wait for the reward that ``score`` started, and add scores and extras to the batch; once per batch."""
        pending = self.state.pending_reward
        self.state.pending_reward = None
        if pending is None:
            return
        group = self.actor_rollout_wg
        self.state.extra_columns = add_scores(pending, batch, metrics, self.reward_fn, group, self.state.step)

    # ---- after the phases of a step

    def _dump(self, batch: DataProto, timing: Timing) -> None:
        folder = self.run_config.trainer.rollout_data_dir
        if folder:
            batch = dumped_rows(batch, self.state.row_order)
            extras = {name: list(batch.non_tensor_batch[name]) for name in self.state.extra_columns}
            self._log_rollout_data(batch, extras, timing, folder)

    def _log_rollout_data(
        self, batch: DataProto, reward_extra_infos_dict: ExtraColumns, timing_raw: Timing, rollout_data_dir: str
    ) -> None:
        """Write the responses of a scored batch to the folder, in the order in which they were asked for."""
        with marked_timer("dump_rollout_generations", timing_raw):
            columns = scored_columns(batch, self.tokenizer, reward_extra_infos_dict, self.state.row_order)
            self._dump_generations(**columns, dump_path=rollout_data_dir)

    def _dump_generations(
        self,
        inputs: Sequence[str],
        outputs: Sequence[str],
        gts: Sequence[Json],
        scores: Sequence[float],
        reward_extra_infos_dict: ExtraColumns,
        dump_path: str,
    ) -> None:
        """Write samples to ``<dump_path>/<step>.jsonl``."""
        dump_generations(dump_path, self.state.step, inputs, outputs, gts, scores, reward_extra_infos_dict)

    def _finish_step(self, batch: DataProto, metrics: Metrics, timing: Timing) -> None:
        """Compute and publish the metrics of the step."""
        assert self.records is not None
        self.records.finish_step(
            batch,
            metrics,
            timing,
            self.worker_groups(),
            self.resource_pool_manager.get_n_gpus(),
            self.use_critic,
            not self.rollouts.loops_score(self.reward_fn),  # if loops score, they have traced the scores
            self.rollouts.take_timeline,
        )
        profiler = self.run_config.global_profiler
        profiling.dump_memory(profiler.tool, profiler.steps, self.state.step, self.actor_rollout_wg)

    # ---- validation

    def _validate(self) -> Metrics:
        """Return the metrics of the current weights on the validation set."""
        samples = validation.collect_samples(
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
        folder = self.run_config.trainer.validation_data_dir
        if folder:
            self._dump_generations(**samples.dumped, dump_path=folder)
        return validation.summarise(samples)

    def _maybe_log_val_generations(
        self, inputs: Sequence[str], outputs: Sequence[str], scores: Sequence[float]
    ) -> None:
        """Show ``trainer.log_val_generations`` of the samples in the trackers that can."""
        samples = inputs, outputs, scores
        count = self.run_config.trainer.log_val_generations
        validation.show_samples(self.validation_generations_logger, self._trackers, samples, count, self.state.step)

    def _generate_for_validation(self, prompts: DataProto, first_prompt: int) -> DataProto:
        """Return ``val_kwargs.n`` responses to each prompt."""
        return self.rollouts.validate(prompts, first_prompt, self.val_reward_fn)

    # ---- profiling

    @contextmanager
    def _watched(self, timing: Timing) -> Iterator[None]:
        """Profile the step and record its timeline if the configuration selects it."""
        assert self.records is not None
        groups = self.worker_groups()
        profiler = self.run_config.global_profiler
        with profiling.captured(profiler, self.state, groups, timing, self._start_profiling, self._stop_profiling):
            self.records.begin_step(groups)
            yield

    def _start_profiling(self, do_profile: bool) -> None:
        """Start the profilers of the roles."""
        if do_profile:
            profiling.start_profiling(self.state, self.worker_groups())

    def _stop_profiling(self, do_profile: bool) -> None:
        """Stop the profilers of the roles."""
        if do_profile:
            profiling.stop_profiling(self.state)
