"""What a run leaves behind: its record, the trackers, the display of its progress, the picture and the report."""

import logging
from collections.abc import Mapping
from typing import Any

from omegaconf import OmegaConf

from verl.trainer.run.display import Progress
from verl.trainer.run.prometheus import PrometheusMetrics
from verl.trainer.run.resume import run_folder
from verl.utils.observe.console import get_console
from verl.utils.observe.curves import draw_curves
from verl.utils.observe.record import RunRecord
from verl.utils.observe.rollout_trace import RolloutTraceConfig
from verl.utils.observe.tracking import Tracking, ValidationGenerationsLogger
from verl.utils.report.page import write_report

logger = logging.getLogger(__name__)


class RunOutput:
    """Publish the metrics of a run everywhere; ``close`` draws the pictures."""

    def __init__(self, config: Any, resumed_step: int | None, total_steps: int) -> None:
        """Open the outputs of a run that continues after ``resumed_step``, None where it starts from scratch."""
        trainer = config.trainer
        self.folder = run_folder(config)
        self.record = RunRecord(self.folder, resumed_step)
        self.makes_report = trainer.report
        self.tracking = Tracking(
            project_name=trainer.project_name,
            experiment_name=trainer.experiment_name,
            default_backend=list(trainer.logger) if not isinstance(trainer.logger, str) else trainer.logger,
            config=OmegaConf.to_container(config, resolve=True),
        )
        self.generations = ValidationGenerationsLogger(trainer.project_name, trainer.experiment_name)
        self.progress = Progress(total_steps, resumed_step or 0)
        self.prometheus = (
            PrometheusMetrics(trainer.project_name, trainer.experiment_name) if trainer.prometheus else None
        )
        if resumed_step is not None:
            get_console().info("resumed after step %d of %d", resumed_step, total_steps)

    def log(self, metrics: Mapping[str, Any], step: int, details: Mapping[str, Any] | None = None) -> None:
        """Publish metrics that are not those of a whole step; the details go to the record only."""
        self.record.log(metrics, step, details)
        self.tracking.log(metrics, step)
        self.progress.note(metrics)
        if self.prometheus is not None:
            self.prometheus.publish(metrics, details)

    def step(self, metrics: Mapping[str, Any], step: int, details: Mapping[str, Any] | None = None) -> None:
        """Publish the metrics of a finished step."""
        self.log(metrics, step, details)
        self.progress.update(step, metrics)

    def log_generations(self, rows: list[tuple[str, str, float]], step: int) -> None:
        """Show validation samples in the trackers that can; one that fails does not end the run."""
        for name, backend in self.tracking.logger.items():
            try:
                self.generations.log({name: backend}, rows, step)
            except Exception as error:  # each library raises its own
                logger.warning(
                    "trainer.logger: %r has not taken the validation samples of step %d, and the run goes on: %s: %s",
                    *(name, step, type(error).__name__, error),
                )

    def close(self, finished: bool) -> None:
        """Close the outputs, write the report, and draw the curves of a run that was not broken off."""
        self.progress.close()
        self._finish_traces()
        self.tracking.finish()
        if not self.record.steps:
            return
        try:
            if finished:
                get_console().info("curves: %s", draw_curves(self.folder))
            if self.makes_report:
                get_console().info("report: %s", write_report(self.folder))
        except ImportError as error:
            logger.warning("no picture of the curves and no report: %s; pip install matplotlib", error)
        except Exception:  # what the run has learned is saved; and where it failed, that error is the one to show
            logger.warning("the report could not be made", exc_info=True)

    @staticmethod
    def _finish_traces() -> None:
        try:
            RolloutTraceConfig.finish()
        except Exception as error:  # each library raises what it likes, and the report is still to come
            logger.warning("rollout.trace: not all traces were sent: %s: %s", type(error).__name__, error)
