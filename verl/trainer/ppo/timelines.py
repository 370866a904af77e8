"""Timelines of the chosen steps: the driver lets all processes record, and writes what they did."""

import logging
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from verl.single_controller.ray import RayWorkerGroup
from verl.utils.observe import timeline

logger = logging.getLogger(__name__)


class Timelines:
    """Writes ``timeline/step_<n>.json`` into the folder of a run for each step in ``steps``."""

    def __init__(self, steps: Collection[int] | None, folder: Path, resumed_step: int | None = 0) -> None:
        """Continue those of a run after ``resumed_step``; None removes those of an older run in the folder."""
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
