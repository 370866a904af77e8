"""The outputs of a run: its record, the trackers, the progress display, Prometheus, the curves and the report."""

import logging
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NotRequired, TypedDict

from omegaconf import DictConfig

from verl.trainer.config.keys import tree_of
from verl.trainer.config.run_config import TrainerConfig
from verl.trainer.config.sft import TrainerOptions
from verl.trainer.run.display import DescribeStep, Progress
from verl.utils.failures import only_warning
from verl.utils.observe.attempts import AttemptsRecord
from verl.utils.observe.console import get_console
from verl.utils.observe.curves import draw_curves
from verl.utils.observe.record import Details, RunRecord, WorkerReport, read_shaped
from verl.utils.observe.rollout_trace import RolloutTraceConfig
from verl.utils.observe.timeline import Part
from verl.utils.observe.tracking import Trackers, Tracking, ValidationGenerationsLogger
from verl.utils.report.flags import MIN_STEPS, NOTHING_TRAINED, find_flags
from verl.utils.report.page import write_report

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

logger = logging.getLogger(__name__)

PREFIX = "verl_"


class RunOutput:
    """Publish the metrics of a run everywhere; ``close`` draws the curves and writes the report."""

    def __init__(
        self,
        options: TrainerConfig | TrainerOptions,
        config: DictConfig,
        resumed_step: int | None,
        total_steps: int,
        describe_step: DescribeStep,
        only_validates: bool = False,
    ) -> None:
        """Open the outputs of a run that continues after ``resumed_step``; None starts from scratch.

        ``config`` is the whole tree, for the trackers; ``describe_step`` makes the text of the progress display. A run
        that ``only_validates`` adds to the record of the folder and replaces no step.
        """
        self.folder = Path(options.default_local_dir).expanduser().absolute()
        self.kept_step = sys.maxsize if only_validates else resumed_step
        self.record = RunRecord(self.folder, self.kept_step)
        self.attempts = AttemptsRecord(self.folder, self.kept_step)
        self.makes_report = options.report
        self._finished_steps = 0
        resolved = tree_of(config)
        self.tracking = Tracking(options.project_name, options.experiment_name, options.logger, resolved)
        self.progress = Progress(total_steps, resumed_step or 0, describe_step)
        self.prometheus = None
        if options.prometheus:
            self.prometheus = PrometheusMetrics(options.project_name, options.experiment_name)
        if resumed_step is not None:
            get_console().info("resumed after step %d of %d", resumed_step, total_steps)

    def log(
        self,
        metrics: Mapping[str, float],
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
            self._finished_steps += 1
            if self._finished_steps == MIN_STEPS:  # soon enough to end a run that learns nothing
                self._warn_if_nothing_is_trained()
            self.progress.update(step, recorded)
        else:
            self.progress.note(metrics)
        if self.prometheus is not None:
            self.prometheus.publish(metrics, details)

    def close(self, curves: bool = False, report: bool = True) -> None:
        """Close the outputs; draw the ``curves`` of a policy that has finished training, and write the ``report``."""
        self.progress.close()
        # A failure must not prevent the report below.
        with only_warning(logger, "rollout.trace: some traces were not sent"):
            RolloutTraceConfig.finish()
        self.tracking.finish()
        if not self.record.steps:
            return
        if self._finished_steps != MIN_STEPS:  # at MIN_STEPS the warning was already logged
            self._warn_if_nothing_is_trained()
        # The run is saved; and if it has failed, the user must see that error and not one of the report.
        with only_warning(logger, "cannot write the report", trace=True):
            self._draw(curves, report)

    def _draw(self, curves: bool, report: bool) -> None:
        try:
            if curves:
                get_console().info("curves: %s", draw_curves(self.folder))
            if self.makes_report and report:
                get_console().info("report: %s", write_report(self.folder))
        except ImportError as error:
            logger.warning("no curves and no report: %s; pip install matplotlib", error)

    def _warn_if_nothing_is_trained(self) -> None:
        try:
            flags = find_flags(read_shaped(self.record.path))
        except (OSError, ValueError) as error:  # the weights are saved already, so a broken record must not end the run
            logger.warning("%s cannot be read: %s", self.record.path, error)
            return
        for flag in flags:
            if flag.name == NOTHING_TRAINED:
                logger.warning("%s: %s", flag.name, flag.reason)


def log_generations(
    generations: ValidationGenerationsLogger, trackers: Trackers, rows: list[tuple[str, str, float]], step: int
) -> None:
    """Send validation samples to the trackers; a tracker that fails does not end the run."""
    for name in trackers:
        text = "trainer.logger: %r did not take the validation samples of step %d; the run continues"
        with only_warning(logger, text, name, step):
            generations.log({name: trackers[name]} if isinstance(trackers, Mapping) else [name], rows, step)


# ---- Prometheus, through Ray (``trainer.prometheus``)


class PrometheusMetrics:
    """Gauges with the last value of every metric; those of a worker have the tags ``group`` and ``rank``.

    Every Ray process sends its gauges to the agent of its node, which serves them at ``/metrics``. Ray prefixes each
    name with ``ray_``.
    """

    def __init__(self, project: str, experiment: str) -> None:
        self._tags = {"project": project, "experiment": experiment}
        self._gauges: dict[str, Gauge] = {}
        get_console().info("metrics for Prometheus: %s", ", ".join(endpoints()) or "Ray exports none")

    def publish(self, metrics: Mapping[str, float], details: Details | None = None) -> None:
        """Set the gauges of the metrics and of the workers' reports."""
        for name, value in metrics.items():
            self._set(metric_name(name), value)
        for group, reports in ((details or {}).get("workers") or {}).items():
            for report in reports:
                tags = {"group": group, "rank": str(report["rank"])}
                for call, seconds in report["seconds"].items():
                    self._set(f"{PREFIX}worker_seconds", seconds, tags | {"call": call})
                for kind, gigabytes in report["memory"].items():
                    self._set(f"{PREFIX}worker_memory_gb", gigabytes, tags | {"kind": kind.removesuffix("_gb")})
                for name, value in report.get("generation", {}).items():
                    self._set(f"{PREFIX}engine_{name}", value, tags)

    def _set(self, name: str, value: str | float | None, tags: Mapping[str, str] | None = None) -> None:
        from ray.util.metrics import Gauge

        if isinstance(value, bool) or not isinstance(value, int | float):
            return  # for a number that is not finite, Ray then serves nothing instead of the last finite value
        tags = {**self._tags, **(tags or {})}
        if name not in self._gauges:
            self._gauges[name] = Gauge(name, description=f"{name}, last value", tag_keys=tuple(tags))
        self._gauges[name].set(float(value), tags=tags)


def metric_name(metric: str) -> str:
    """Return the name of a metric in the characters that Prometheus allows: ``actor/lr`` is ``verl_actor_lr``."""
    return PREFIX + re.sub(r"\W+", "_", metric, flags=re.ASCII).strip("_")


def endpoints() -> list[str]:
    """Return the address at which each node of the cluster serves its metrics."""
    import ray

    return [
        f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
        for node in ray.nodes()
        if node["Alive"] and node.get("MetricsExportPort")
    ]


# ---- reports of the ranks, with digests of weights and random states


class Digests(TypedDict):
    """Digests of a rank: its random state, its part of the weights if it has any, and its part of the batch."""

    random_state: str
    weights: NotRequired[str]
    batch: NotRequired[dict[str, str]]


class RankReport(WorkerReport):
    """A rank's report, with its digests if requested and the timeline spans of its process."""

    digests: NotRequired[Digests]
    timeline: NotRequired[Part]


def take_parts(workers: Mapping[str, Sequence[RankReport]]) -> list[Part]:
    """Move the timeline spans out of the reports of all ranks, named by group and rank."""
    parts = []
    for group, reports in workers.items():
        for report in reports:
            if (part := report.pop("timeline", None)) is not None:
                parts.append(replace(part, process=f"{group} {part.process}"))
    return parts


def take_digests(workers: Mapping[str, Sequence[RankReport]]) -> dict[str, dict[str, str]]:
    """Move the digests out of the reports of all ranks, by group, into the phases ``weights`` and ``random state``."""
    weights: dict[str, str] = {}
    states: dict[str, str] = {}
    for group, reports in workers.items():
        for report in reports:
            digests = report.pop("digests")
            name = f"{group}, rank {report['rank']}"
            states[name] = digests["random_state"]
            if "weights" in digests:
                weights[name] = digests["weights"]
    return {"weights": weights, "random state": states}
