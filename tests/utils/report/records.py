"""Synthetic records of runs, healthy or broken in a known way."""

import json
import math
import random

STEPS = 40


def healthy(steps: int = STEPS, ranks: int = 2, seed: int = 0) -> dict[int, dict]:
    """Return the entries of a sound run."""
    noise = random.Random(seed)
    entries = {}
    for step in range(1, steps + 1):
        share = step / steps
        seconds = [0.4 + noise.uniform(0, 0.02) for _ in range(ranks)]
        data = {
            "critic/score/mean": 0.2 + 0.5 * share + noise.uniform(-0.03, 0.03),
            "critic/score/min": 0.0,
            "critic/score/max": 1.0,
            "actor/entropy": 0.9 - 0.4 * share + noise.uniform(-0.02, 0.02),
            "actor/ppo_kl": 1e-4 * (1 + noise.random()),
            "actor/kl_loss": 1e-3 * share,
            "actor/pg_clipfrac": 0.01 * noise.random(),
            "actor/grad_norm": 1.0 + noise.uniform(-0.2, 0.2),
            "actor/pg_loss": 0.01,
            "training/rollout_log_prob_diff_mean": 1e-6 * (1 + noise.random()),
            "training/rollout_log_prob_diff_max": 1e-5 * (1 + noise.random()),
            "weight_sync/versions_behind": 0.0,
            "response_length/mean": 100 + 30 * share,
            "response_length/min": 10,
            "response_length/max": 250,
            "response_length/clip_ratio": 0.01,
            "reward/failed_ratio": 0.0,
            "timing_s/step": 1.0,
            "timing_s/gen": 0.4,
            "timing_s/update_actor": 0.5,
            "perf/throughput": 5000.0,
            "perf/mfu/actor": 0.3,
            "perf/total_num_tokens": 4000,
            "perf/computed_tokens/actor": 1500,
            "perf/memory/actor/max_rss_gb": 2.0,
        }
        entries[step] = {
            "data": data,
            "response_length": {"limit": 256, "counts": [int(50 * math.exp(-(((b - 9) / 4) ** 2))) for b in range(24)]},
            "workers": {
                "actor_rollout": [
                    {
                        "rank": rank,
                        "seconds": {"generation": seconds[rank], "update_actor": 0.5},
                        "memory": {"host_gb": 2.0 + noise.uniform(0, 0.02)},
                    }
                    for rank in range(ranks)
                ]
            },
            "phases": {"generate": {"responses": f"{step:016x}"}, "weights": {"actor_rollout, rank 0": f"{step:016x}"}},
        }
    entries[steps]["data"]["val-core/sums/acc/mean@1"] = 0.8
    return entries


def changed(key: str, value) -> dict[int, dict]:
    """Return a healthy record with ``value(step)`` as a metric's value, except where that is None."""
    entries = healthy()
    for step, entry in entries.items():
        new = value(step)
        if new is not None:
            entry["data"][key] = new
    return entries


def slow_rank() -> dict[int, dict]:
    """Return a run in which rank 1 generates twice as slowly."""
    entries = healthy()
    for entry in entries.values():
        entry["workers"]["actor_rollout"][1]["seconds"]["generation"] *= 2
    return entries


def leak() -> dict[int, dict]:
    """Return a run in which the host memory of rank 0 grows by 50 MiB a step."""
    entries = healthy()
    for step, entry in entries.items():
        entry["workers"]["actor_rollout"][0]["memory"]["host_gb"] += 50 / 1024 * step
    return entries


def long_responses() -> dict[int, dict]:
    """Return a run whose responses grow to the limit."""
    entries = healthy()
    for step, entry in entries.items():
        entry["data"]["response_length/mean"] = min(250, 100 + 6 * step)
        entry["data"]["response_length/clip_ratio"] = max(0.0, (step - 10) / 40)
    return entries


def write(folder, entries) -> None:
    """Write entries as the record of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps({"step": step, **entry}) for step, entry in entries.items()]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
