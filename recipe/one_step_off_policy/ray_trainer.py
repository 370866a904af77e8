"""The training loop with generation one step ahead."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from verl.experimental.agent_loop import AgentLoopManager
from verl.protocol import DataProto
from verl.single_controller.base.driver_phase import phase
from verl.trainer.ppo.checkpoint import DataPosition
from verl.trainer.ppo.loaders import EndOfDataError, Rows
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.rollouts import Sampled
from verl.trainer.ppo.state import Metrics, Timing
from verl.utils.dataset.factory import has_state
from verl.utils.numerics.seeding import ProcessRandomState
from verl.utils.observe.timeline import RECORDED
from verl.utils.profiler import marked_timer

from .generation import FILE_NAME, GenerationBatchFuture, load_generation


class OneStepOffRayTrainer(RayPPOTrainer):
    """PPO whose servers generate the batch of the next step while the present batch trains.

    At the start of step k the servers have just finished batch k. They get the weights of step k - 1 and begin with
    batch k + 1. So batches 1 and 2 are sampled with the initial weights, and batch k with the weights of step k - 2.

    A checkpoint also holds the responses of the next step, because they were sampled with older weights, which a
    resumed run no longer has. The checkpoint of the last step has no such responses; a run that continues from it draws
    the same prompts, and samples them with the weights of the checkpoint.
    """

    _may_end_before = ()  # no step may end early as the last one: its checkpoint already needs the next batch
    _scores_while_generating = False  # the reward model's devices may still train or score the previous batch
    _next: GenerationBatchFuture | None = None
    _now: GenerationBatchFuture | None = None
    _kept: DataProto | None = None
    _end_of_data: EndOfDataError | None = None
    _undrawn: DataPosition | None = None
    """The position in the data after the last draw, where a run that continues this one begins."""

    # ---- the loop

    def fit(self) -> None:
        """Train until the last step."""
        try:
            super().fit()
        finally:
            coming = self._next
            self._next = None
            if coming is not None and coming.pending is not None:
                self._loops.abandon(coming.pending)

    def _sync_before_generation(self, timing: Timing) -> None:
        """Do nothing: ``collect`` syncs the weights once the servers have finished the batch of this step."""

    def collect(self, rows: Iterator[Rows], metrics: Metrics, timing: Timing) -> DataProto:
        """Wait for the batch of this step, start the generation of the next batch, and score this one."""
        now = self._take_next(rows, timing)
        batch = self._checked("prepare", None, lambda: now.prepared)
        batch = self._checked("generate", batch, self.generate, metrics, timing)
        if not self.state.is_last_step:
            with suppress(EndOfDataError):  # the next step raises it
                self._next = self._launch(rows, self.state.step + 1, timing)
        elif self.checkpoints.may_be_written:
            self._undrawn = self.checkpoints.position()
        now.random_state.restore()  # the draw of the next batch has changed the random state
        return self._checked("score", batch, self.score, metrics, timing)

    def _take_next(self, rows: Iterator[Rows], timing: Timing) -> GenerationBatchFuture:
        """Return the batch of this step; request it now if it was not requested a step ahead."""
        if self._end_of_data is not None:
            raise self._end_of_data
        now = self._next
        self._next = None
        kept = self._kept
        self._kept = None
        if now is None and kept is not None:
            now = self._request(rows, self.state.step)
            if not now.take(kept):
                self._begin(now, timing)
        self._now = now or self._launch(rows, self.state.step, timing)
        return self._now

    def _launch(self, rows: Iterator[Rows], step: int, timing: Timing) -> GenerationBatchFuture:
        """Draw the batch of a step, and start its generation."""
        coming = self._request(rows, step)
        self._begin(coming, timing)
        return coming

    def _request(self, rows: Iterator[Rows], step: int) -> GenerationBatchFuture:
        """Draw the batch of a step with the seeds of that step.

        Raises: EndOfDataError.
        """
        position = self.checkpoints.position() if step > self.state.step else None
        metrics: Metrics = {}
        with self._as_of_step(step):
            try:
                prepared = self.prepare(next(rows))
            except EndOfDataError as end:
                self._end_of_data = end
                self._undrawn = position
                raise
            batch = prepared.select()
            prompts, requests, seeds = self.rollouts.requests(batch, self.reward_fn, metrics)
        random_state = ProcessRandomState.now()
        return GenerationBatchFuture(step, prepared, batch, prompts, requests, seeds, metrics, random_state, position)

    def _begin(self, coming: GenerationBatchFuture, timing: Timing) -> None:
        """Sync the newest weights to the servers, and send them the requests."""
        if self.records is not None and self.records.has_timeline(coming.step):
            coming.requests.meta_info[RECORDED] = True
        with phase("weight_sync", step=coming.step), marked_timer("sync_rollout_weights", timing):
            coming.pending = self._loops.begin(coming.requests, trains_meanwhile=True)
        self.state.engine_version = self.state.weights_version

    def _sample(self, batch: DataProto, metrics: Metrics, timing: Timing) -> Sampled:
        """Wait for the responses to the batch of this step; sample spare prompts now, with the newest weights."""
        now = self._now
        if now is None or batch is not now.prepared:
            return super()._sample(batch, metrics, timing)
        batch.batch = now.batch.batch
        batch.non_tensor_batch = now.batch.non_tensor_batch
        with phase("generate", step=now.step), marked_timer("wait_prev_gen", timing):
            output = self._finished(now)
        if self.records is not None:
            self.records.log_attempts(now.attempts, now.step)
            self.records.keep_spans(now.recorded)
        metrics.update(now.metrics)
        self.rollouts.receive(now.requests, output, metrics, timing)
        self._now = None
        return now.prompts, output, now.seeds

    def _finished(self, batch: GenerationBatchFuture) -> DataProto:
        """Wait for the responses to a batch, and return them."""
        if batch.gen_batch_output is None:
            assert batch.pending is not None
            try:
                batch.gen_batch_output = self._loops.finish(batch.pending)
            except Exception:  # log the failed attempts as well
                if self.records is not None:
                    self.records.log_attempts(self._loops.take_attempts(), batch.step)
                raise
            batch.pending = None
            batch.attempts = self._loops.take_attempts()
            batch.recorded = self._loops.take_timeline()
        return batch.gen_batch_output

    @property
    def _loops(self) -> AgentLoopManager:
        assert self.async_rollout_manager is not None, "the checks before the start ask for rollout.mode=async"
        return self.async_rollout_manager

    @contextmanager
    def _as_of_step(self, step: int) -> Iterator[None]:
        """Let the trainer be at another step within the block, so that a draw uses the seeds of that step."""
        state = self.state
        before = state.step, state.prompts_drawn
        if step != state.step:
            state.step = step
            state.prompts_drawn = 0
        try:
            yield
        finally:
            state.step, state.prompts_drawn = before

    # ---- validation and checkpoints

    def _validate(self) -> Metrics:
        """Validate the newest weights, after the servers have finished their running batch."""
        if self._next is not None:
            with phase("generate", step=self._next.step):
                self._finished(self._next)
        return super()._validate()

    def _save_checkpoint(self) -> None:
        """Write a checkpoint with the responses of the next step.

        The saved position is the one before the draw of that batch, since a resumed run draws its prompts again. What a
        curriculum sampler has learned since is saved in its present state.
        """
        coming = self._next
        position = self._undrawn if coming is None else coming.position
        if position is None:
            super()._save_checkpoint()
            return
        sampler = self.train_dataloader.sampler
        position = replace(position, learned=sampler.state_dict() if has_state(sampler) else {})
        if coming is None:
            self.checkpoints.save(position)
            return
        with phase("generate", step=coming.step):
            self._finished(coming)
        coming.save(self.checkpoints.begin())
        self.checkpoints.save(position, [FILE_NAME])

    def _load_checkpoint(self) -> int | None:
        """Restore the run that the configuration resumes, with the responses of its next step."""
        step = super()._load_checkpoint()
        files = [path for path in self.checkpoints.extra_files if path.name == FILE_NAME]
        for path in files if step is not None else ():
            self.checkpoints.check_extra_file(path)
            self._kept = load_generation(path, list(self.run_config.trainer.trusted_classes))
        return step
