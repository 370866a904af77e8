"""Gauges by name and tags, and as Ray serves them."""

import math
import re
import time
import urllib.request

import pytest

from verl.trainer.run import output
from verl.trainer.run.output import PrometheusMetrics, endpoints, metric_name

DETAILS = {
    "workers": {
        "actor_rollout": [
            {
                "rank": 1,
                "seconds": {"update_actor": 2.0},
                "memory": {"host_gb": 3.0},
                "generation": {"tokens": 500.0, "seconds": 0.5},
            }
        ]
    }
}
METRICS = {"actor/lr": 1e-6, "val-core/x/acc/mean@4": 1, "text": "no", "flag": True, "bad": float("nan")}


def test_gauges_by_name_and_tags(monkeypatch):
    values = {}

    class Gauge:
        def __init__(self, name, description, tag_keys):
            self.name, self.keys = name, tag_keys

        def set(self, value, tags):
            assert tuple(tags) == self.keys
            values[self.name, tuple(tags.values())[2:]] = value

    monkeypatch.setattr("ray.util.metrics.Gauge", Gauge)
    monkeypatch.setattr(output, "endpoints", lambda: [])
    PrometheusMetrics("p", "e").publish(METRICS, DETAILS)
    worker = ("actor_rollout", "1")
    assert math.isnan(values.pop(("verl_bad", ())))
    assert values == {
        ("verl_actor_lr", ()): 1e-6,
        ("verl_val_core_x_acc_mean_4", ()): 1.0,
        ("verl_worker_seconds", (*worker, "update_actor")): 2.0,
        ("verl_worker_memory_gb", (*worker, "host")): 3.0,
        ("verl_engine_tokens", worker): 500.0,
        ("verl_engine_seconds", worker): 0.5,
    }
    assert re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", metric_name("val-core/größe/best@2/mean"))


@pytest.mark.full
def test_what_ray_serves(tmp_path):
    """A cluster of its own as runs start it, and its agent asked as Prometheus would."""
    import ray

    from verl.trainer.run.launch import LOCAL_SYSTEM_CONFIG

    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        _temp_dir=f"/tmp/r{tmp_path.name[-8:]}",
        _system_config=LOCAL_SYSTEM_CONFIG | {"metrics_report_interval_ms": 1000},
    )
    try:
        gauges = PrometheusMetrics("p", "e")
        (endpoint,) = endpoints()
        text = ""
        while "ray_verl_engine_tokens" not in text:
            gauges.publish(METRICS, DETAILS)
            time.sleep(0.5)
            try:
                text = urllib.request.urlopen(endpoint, timeout=5).read().decode()
            except OSError:
                continue
        line = next(line for line in text.splitlines() if line.startswith("ray_verl_engine_tokens{"))
        assert 'rank="1"' in line and 'experiment="e"' in line and line.endswith(" 500.0")
        assert re.search(r"^ray_verl_actor_lr\{.*\} 1e-06$", text, re.MULTILINE)
        assert "ray_verl_bad{" not in text
    finally:
        ray.shutdown()
