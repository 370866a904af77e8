"""The course of a run: when it validates, saves and ends."""

import logging
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from verl.single_controller.base.driver_phase import phase
from verl.trainer.config.run_config import RunConfig
from verl.trainer.ppo.checkpoint import Checkpoints
from verl.trainer.ppo.loaders import EndOfDataError
from verl.trainer.ppo.reward import NothingScoredError
from verl.trainer.ppo.state import Metrics, RunState, Timing, timed
from verl.trainer.run.clock import CLOCK
from verl.trainer.run.display import is_end_requested
from verl.trainer.run.ending import EndRequested

logger = logging.getLogger(__name__)


class Course:
    """Decides after which steps a run validates and saves, and before which phases it may end."""

    def __init__(
        self,
        run: RunConfig,
        state: RunState,
        checkpoints: Checkpoints,
        validate: Callable[[], Metrics],
        save: Callable[[], None],
        publish: Callable[[Metrics, int], None],
        may_end_before: Collection[str],
    ) -> None:
        """Follow the run.

        Args: ``validate`` returns the metrics of the current weights, ``save`` writes a checkpoint, and ``publish``
            publishes metrics of a step; ``may_end_before`` are the phases before which a step may end.
        """
        self._options = run.trainer
        self._state = state
        self._checkpoints = checkpoints
        self._validate = validate
        self._save = save
        self._publish = publish
        self._may_end_before = may_end_before

    # ---- the steps

    def ends_after_first_validation(self) -> bool:
        """Validate the starting weights if the configuration asks for it; return whether the run ends there."""
        if not (self._options.val_before_train or self._options.val_only):
            return False
        with phase("validate", step=self._state.step):
            metrics = self._validate()
        CLOCK.mark("validation")
        if metrics:  # empty if a reward model judges the rows: they have no ground truth
            self._publish(metrics, self._state.step)
        return bool(self._options.val_only)

    def begin_step(self) -> None:
        """Move to the next step; record where its data begin, for a checkpoint of the last full step."""
        if self._checkpoints.may_be_written:
            self._checkpoints.keep_start_of_step()
        self._state.begin_step()
        self._end_if_requested()

    def before(self, phase_name: str) -> None:
        """End the run with the last full step if SIGTERM was received and a step may be given up before this phase.

        Raises: EndRequested.
        """
        if phase_name in self._may_end_before:
            self._end_if_requested()

    def validate(self, metrics: Metrics, timing: Timing) -> None:
        """Validate every ``trainer.test_freq`` steps and after the last one."""
        state = self._state
        frequency = self._options.test_freq
        if frequency <= 0 or not (state.is_last_step or state.step % frequency == 0):
            return
        if self._is_end_requested():
            logger.warning("step %d is not validated: the run saves it and ends", state.step)
            return
        with timed("testing", timing, state.step):
            metrics.update(self._validate())

    def save(self, timing: Timing) -> None:
        """Write a checkpoint every ``trainer.save_freq`` steps, after the last one, and before capacity expires."""
        state = self._state
        state.max_step_s = max(state.max_step_s, timing["step"])
        state.unrecorded_step = state.step
        if self._options.save_freq <= 0:
            return
        self._checkpoints.finish(wait=state.is_last_step)
        if self._checkpoints.is_due():
            with timed("save_checkpoint", timing, state.step):
                self._save()

    def step_is_recorded(self) -> None:
        """Let the tracker name the checkpoint of the step, which now stands in the record.

        A run that dies before this continues from an earlier checkpoint, and records the step then.
        """
        self._state.unrecorded_step = None
        if self._state.unfinished_checkpoint is not None:
            self._checkpoints.finish(wait=self._state.is_last_step)

    # ---- the end

    @contextmanager
    def to_the_end(self) -> Iterator[None]:
        """Save the last full step if the run ends within a later step, for lack of data, scores or time."""
        state = self._state
        try:
            yield
        except EndOfDataError as end:
            self.end_early(end)
        except Exception as error:  # whatever ends the run, its message names the step
            error.add_note(f"in training step {state.step} of {state.total_steps}")
            is_asked = isinstance(error, EndRequested)
            if is_asked or isinstance(error, NothingScoredError):
                state.step -= 1
                if is_asked or self._options.save_freq > 0:
                    self._save_last_full_step({})
            raise

    def end_early(self, reason: EndOfDataError) -> None:
        """Validate and save the last full step, if the data end before the planned number of steps.

        Raises: ``reason`` if there is no full step.
        """
        state = self._state
        state.step -= 1  # the step that could not be filled
        if not state.step:
            raise reason
        planned = state.total_steps
        state.total_steps = state.step
        logger.warning("the run ends after step %d of at most %d: %s", state.step, planned, reason)
        metrics: Metrics = {}
        timing: Timing = {}
        if self._options.test_freq > 0 and state.step % self._options.test_freq:
            self.validate(metrics, timing)
        if self._options.save_freq > 0:
            self._save_last_full_step(timing)
        self._publish(metrics | {f"timing_s/{name}": seconds for name, seconds in timing.items()}, state.step)

    def _save_last_full_step(self, timing: Timing) -> None:
        """Save the step before one that could not be filled; a resumed run draws that one again."""
        state = self._state
        if not state.step:
            return
        if self._checkpoints.newest_step != state.step:
            self._checkpoints.go_back_to_start_of_step()
            with timed("save_checkpoint", timing, state.step):
                self._save()
        self._checkpoints.finish()

    def _end_if_requested(self) -> None:
        if self._is_end_requested():
            state = self._state
            raise EndRequested(f"SIGTERM: the run ends after step {state.step - 1} of {state.total_steps}")

    def _is_end_requested(self) -> bool:
        return self._options.save_on_sigterm_s is not None and is_end_requested()
