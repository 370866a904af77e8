"""The records of a run: its outputs, the details of each step, its timelines and its traces."""

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from omegaconf import DictConfig
from transformers import PreTrainedTokenizerBase

from verl.protocol import DataProto, tensors_of
from verl.protocol.lazy import take_touched
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo import metric_utils
from verl.trainer.ppo.records import StepRecord, trace_batch
from verl.trainer.ppo.segments import per_trajectory
from verl.trainer.ppo.state import Metrics, RunState, Timing
from verl.trainer.run.clock import CLOCK
from verl.trainer.run.ending import EndRequested
from verl.trainer.run.output import RunOutput
from verl.utils.observe import timeline
from verl.utils.observe.attempts import AttemptLine
from verl.utils.observe.rollout_trace import RolloutTraceConfig
from verl.utils.observe.timeline import Part

logger = logging.getLogger(__name__)


class Timelines:
    """Writes ``timeline/step_<n>.json`` into the folder of a run for each step in ``steps``."""

    def __init__(self, steps: Collection[int] | None, folder: Path, resumed_step: int | None = 0) -> None:
        """Keep the timelines up to ``resumed_step``; None removes all timelines of an older run in the folder."""
        for path in timeline.timelines_of(folder):
            if resumed_step is None or timeline.step_of(path) > resumed_step:
                path.unlink(missing_ok=True)
        self._steps = frozenset(steps or ())
        self._folder = folder
        self._clock: timeline.Clock | None = None

    def records(self, step: int) -> bool:
        """Whether a step is chosen."""
        return step in self._steps

    def begin(self, step: int, groups: Mapping[str, RayWorkerGroup]) -> None:
        """Let this process and the workers record, if the step is chosen."""
        if not self.records(step):
            return
        self._clock = timeline.Clock.now()
        for group in groups.values():
            group.start_timeline()
        timeline.start()

    def finish(self, step: int, others: Iterable[timeline.Part]) -> Path | None:
        """Write the spans of this process and of the others; return the file, None for a step that is not chosen.

        A failed write loses the timeline with a warning and does not end the run.
        """
        own = timeline.take("trainer")
        if own is None or self._clock is None:
            return None
        path = timeline.timeline_path(self._folder, step)
        try:
            timeline.write_timeline(path, [own, *others], self._clock, step)
        except OSError as error:
            logger.warning("the timeline of step %d could not be written to %s: %s", step, path, error)
            return None
        return path


class RunRecords:
    """Publishes and keeps what happens in each step of a run.

    Attributes: ``output`` publishes metrics, and has the account of the attempts of agent loops.
    """

    def __init__(
        self,
        run: RunConfig,
        config: DictConfig,
        state: RunState,
        resumed_step: int | None,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        """Open the records of a run that continues after ``resumed_step``; None starts from scratch."""
        options = run.trainer
        self._options = options
        self._state = state
        self._tokenizer = tokenizer
        self.output = RunOutput(
            options, config, resumed_step, state.total_steps, metric_utils.describe_step, options.val_only
        )
        trace = run.actor_rollout_ref.rollout.trace
        RolloutTraceConfig.init(
            trace.project_name or options.project_name,
            trace.experiment_name or options.experiment_name,
            trace.backend,
            trace.token2text,
            max_samples_per_step=trace.max_samples_per_step_per_worker,
        )
        algorithm = run.algorithm
        veto = None if algorithm.rollout_is_threshold is None else algorithm.rollout_is_veto_threshold
        self._step = StepRecord(options.record_digests, options.record_samples, tokenizer, veto)
        self._timelines = Timelines(options.timeline_steps, self.output.folder, self.output.kept_step)
        self._spans: list[Part] = []

    def begin_step(self, groups: Mapping[str, RayWorkerGroup]) -> None:
        """Let all processes record, if the step has a timeline."""
        self._timelines.begin(self._state.step, groups)

    def has_timeline(self, step: int) -> bool:
        """Whether a step has a timeline."""
        return self._timelines.records(step)

    def keep_spans(self, spans: Iterable[Part]) -> None:
        """Keep spans of an earlier step for the timeline of this one, to which they belong."""
        self._spans += spans

    def phase(self, name: str, batch: DataProto) -> None:
        """Digest the columns that a phase has added, with the rows in the order of the data."""
        self._step.phase(name, batch, None if name == "prepare" else self._state.row_order)

    def finish_step(
        self,
        batch: DataProto,
        metrics: Metrics,
        timing: Timing,
        groups: Mapping[str, RayWorkerGroup],
        num_gpus: int,
        use_critic: bool,
        traces_scores: bool,
        others: Callable[[], Sequence[Part]],
    ) -> None:
        """Add the metrics of the step, and publish them with its details.

        Args:
            traces_scores: whether the responses are still to be traced with their scores.
            others: returns the timeline spans of processes that are no workers; called when the workers have reported.
        """
        step = self._state.step
        self._step.ask_workers(groups)
        metrics["training/global_step"] = step
        metrics["training/epoch"] = self._state.epoch
        metrics.update(metric_utils.compute_data_metrics(batch, use_critic, groups["actor_rollout"]))
        metrics.update(metric_utils.compute_timing_metrics(batch, timing))
        metrics.update(metric_utils.compute_throughput_metrics(batch, timing, num_gpus))
        CLOCK.mark("first_step")
        metrics.update(CLOCK.report())
        if traces_scores:
            trajectories = per_trajectory(batch)
            scores = tensors_of(trajectories)["token_level_scores"].sum(-1)
            trace_batch(trajectories, scores, step, self._tokenizer)
        details = self._step.finish(batch, metrics)
        if self._options.lazy_columns:
            metrics["driver/column_bytes"] = float(sum(take_touched().values()))
        self.output.log(metrics, step, details, finished=True)
        self._timelines.finish(step, [*self._step.parts, *others(), *self._spans])
        self._spans = []

    def log_attempts(self, attempts: Sequence[AttemptLine], step: int | None = None) -> None:
        """Add attempts of agent loops to the account of a step, by default the current one."""
        self.output.attempts.log(self._state.step if step is None else step, attempts)

    def __enter__(self) -> Self:
        """Return the open records."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the outputs; draw the curves if the run has finished.

        The launching process writes the report of a run that SIGTERM has ended.
        """
        self.output.close(kind is None, report=not isinstance(error, EndRequested))
