"""The outputs of a run: its record, the trackers, the progress display, the curves and the report."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from omegaconf import DictConfig, OmegaConf

from verl.trainer.run.display import DescribeStep, Progress
from verl.trainer.run.prometheus import PrometheusMetrics
from verl.utils.observe.console import get_console
from verl.utils.observe.curves import draw_curves
from verl.utils.observe.generations import ValidationGenerationsLogger
from verl.utils.observe.record import Details, RunRecord
from verl.utils.observe.rollout_trace import RolloutTraceConfig
from verl.utils.observe.tracking import Tracking
from verl.utils.report.page import write_report

logger = logging.getLogger(__name__)


class OutputOptions(Protocol):
    """The keys of a ``trainer`` node that say where a run publishes its metrics."""

    default_local_dir: str
    project_name: str
    experiment_name: str
    logger: str | list[str]
    report: bool

    @property
    def prometheus(self) -> bool:
        """Whether to export the metrics for Prometheus."""


class RunOutput:
    """Publish the metrics of a run everywhere; ``close`` draws the curves and writes the report."""

    def __init__(
        self,
        options: OutputOptions,
        config: DictConfig,
        resumed_step: int | None,
        total_steps: int,
        describe_step: DescribeStep,
    ) -> None:
        """Open the outputs of a run that continues after ``resumed_step``; None starts from scratch.

        ``config`` is the whole tree, for the trackers; ``describe_step`` makes the text of the progress display.
        """
        self.folder = Path(options.default_local_dir).expanduser().absolute()
        self.record = RunRecord(self.folder, resumed_step)
        self.makes_report = options.report
        resolved: Any = OmegaConf.to_container(config, resolve=True)
        self.tracking = Tracking(options.project_name, options.experiment_name, options.logger, resolved)
        self.generations = ValidationGenerationsLogger(options.project_name, options.experiment_name)
        self.progress = Progress(total_steps, resumed_step or 0, describe_step)
        self.prometheus = None
        if options.prometheus:
            self.prometheus = PrometheusMetrics(options.project_name, options.experiment_name)
        if resumed_step is not None:
            get_console().info("resumed after step %d of %d", resumed_step, total_steps)

    def log(
        self,
        metrics: Mapping[str, Any],
        step: int,
        details: Details | None = None,
        record_only: Mapping[str, float] | None = None,
        finished: bool = False,
    ) -> None:
        """Publish metrics of a step; the display moves on when the step is ``finished``.

        ``details`` and the metrics in ``record_only`` go to the record only.
        """
        recorded = {**metrics, **(record_only or {})}
        self.record.log(recorded, step, details)
        self.tracking.log(metrics, step)
        if finished:
            self.progress.update(step, recorded)
        else:
            self.progress.note(metrics)
        if self.prometheus is not None:
            self.prometheus.publish(metrics, details)

    def log_generations(self, rows: list[tuple[str, str, float]], step: int) -> None:
        """Send validation samples to the trackers; a tracker that fails does not end the run."""
        for name, backend in self.tracking.logger.items():
            try:
                self.generations.log({name: backend}, rows, step)
            except Exception as error:  # each library raises its own
                text = f"trainer.logger: {name!r} did not take the validation samples of step {step}; the run continues"
                logger.warning("%s: %s: %s", text, type(error).__name__, error)

    def close(self, curves: bool = False) -> None:
        """Close the outputs and write the report; draw the ``curves`` of a policy that has finished training."""
        self.progress.close()
        try:
            RolloutTraceConfig.finish()
        except Exception as error:  # each library raises its own, and the report is still to come
            logger.warning("rollout.trace: some traces were not sent: %s: %s", type(error).__name__, error)
        self.tracking.finish()
        if not self.record.steps:
            return
        try:
            if curves:
                get_console().info("curves: %s", draw_curves(self.folder))
            if self.makes_report:
                get_console().info("report: %s", write_report(self.folder))
        except ImportError as error:
            logger.warning("no curves and no report: %s; pip install matplotlib", error)
        except Exception:  # the run is saved; and if it has failed, the user must see that error and not this one
            logger.warning("cannot write the report", exc_info=True)
