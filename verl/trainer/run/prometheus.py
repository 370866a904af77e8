"""Export the metrics of a run to Prometheus, through Ray (``trainer.prometheus``)."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from verl.utils.observe.console import get_console
from verl.utils.observe.record import Details

if TYPE_CHECKING:
    from ray.util.metrics import Gauge

PREFIX = "verl_"


class PrometheusMetrics:
    """Gauges with the last value of every metric; those of a worker have the tags ``group`` and ``rank``.

    Every Ray process sends its gauges to the agent of its node, which serves them at ``/metrics``. Ray prefixes each
    name with ``ray_``.
    """

    def __init__(self, project: str, experiment: str) -> None:
        self._tags = {"project": project, "experiment": experiment}
        self._gauges: dict[str, Gauge] = {}
        get_console().info("metrics for Prometheus: %s", ", ".join(endpoints()) or "Ray exports none")

    def publish(self, metrics: Mapping[str, Any], details: Details | None = None) -> None:
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

    def _set(self, name: str, value: Any, tags: Mapping[str, str] | None = None) -> None:
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
