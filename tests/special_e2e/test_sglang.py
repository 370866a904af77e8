"""Whole runs with SGLang: rollout and trainer agree, and the death of a process of the engine ends the run by name."""

import itertools
import json
import math
from collections import Counter

import pytest

from verl.utils.observe.timeline import timelines_of

from .fault_matrix import OF_SGLANG, EngineCell, assert_same_training, kill_process_of_engine
from .test_async_rollout import ASYNC, SHORT
from .test_standalone_servers import APART
from .test_train import TWO_WORKERS

pytest.importorskip("sglang")

SGLANG = {"actor_rollout_ref.rollout.name": "sglang", "trainer.total_training_steps": 2, "trainer.test_freq": 2}
COOLER, PLAIN = ({"actor_rollout_ref.rollout.temperature": value} for value in (0.7, 1.0))
MEGATRON = {
    "--config-name": "ppo_megatron_trainer",
    "trainer.n_gpus_per_node": 2,
    "actor_rollout_ref.actor.megatron.tensor_model_parallel_size": 2,
}
RUNS = {
    "served": ASYNC | COOLER,
    "batches": PLAIN,
    "two workers": TWO_WORKERS | PLAIN,
    "two workers, served": TWO_WORKERS | ASYNC | COOLER,
    "Megatron TP 2": MEGATRON | PLAIN,
    "Megatron TP 2, served": MEGATRON | ASYNC | COOLER,
}


@pytest.mark.parametrize("kind", ["served", *(pytest.param(kind, marks=pytest.mark.full) for kind in list(RUNS)[1:])])
def test_rollout_and_trainer_agree(workspace, kind):
    """In fp32 they differ by rounding, after updates that moved the weights."""
    run = workspace.train(f"sglang-{kind.replace(' ', '_').replace(',', '')}", SGLANG | RUNS[kind])
    assert sorted(run.steps) == [1, 2]
    for step in (1, 2):
        numbers = run.steps[step]
        gaps = check_gaps(numbers)
        print(f"{kind}, step {step}: mean {gaps['mean']:.1e}, max {gaps['max']:.1e}")
        assert numbers["actor/grad_norm"] > 0
        assert numbers["weight_sync/checksum_ok"] == 1 and numbers["weight_sync/unverified_tensors"] == 0
        assert all(map(math.isfinite, numbers.values()))
    assert "val-core/letters/reward/mean@1" in run.steps[2]


@pytest.mark.full
@pytest.mark.parametrize("servers", [1, 2])
def test_standalone_servers_train_as_the_hybrid_engine(workspace, servers):
    """Two servers share the requests."""
    together = SGLANG | SHORT | ASYNC | PLAIN | {"trainer.n_gpus_per_node": servers}
    hybrid = workspace.train(f"sglang-hybrid-{servers}", together)
    counted = {"actor_rollout_ref.rollout.n_gpus_per_node": servers}
    apart = workspace.train(f"sglang-apart-{servers}", together | APART | counted)
    assert_same_training(apart, hybrid, (1, 2))
    for run, step in itertools.product((apart, hybrid), (1, 2)):
        check_gaps(run.steps[step])
    assert apart.steps[2]["weight_sync/servers"] == servers
    (path,) = timelines_of(apart.folder)
    trace = json.loads(path.read_text())["traceEvents"]
    samples = Counter(each["pid"] for each in trace if each.get("cat") == "request" and each["name"] == "sample")
    assert len(samples) == servers and min(samples.values()) >= 0.3 * sum(samples.values())


def check_gaps(numbers):
    gaps = {part: numbers[f"training/rollout_log_prob_diff_{part}"] for part in ("mean", "max")}
    assert gaps["mean"] < 1e-5 and gaps["max"] < 1e-4
    return gaps


@pytest.mark.full  # engines of tests that run at the same time may look like leftovers of this one
def test_a_death_ends_the_run_by_name(workspace):
    """One cell of the matrix; nothing is left behind."""
    cell = EngineCell("scheduler", "agent loops", "generate")
    result, _ = kill_process_of_engine(workspace, cell, "sglang-killed", OF_SGLANG | ASYNC | {"trainer.test_freq": -1})
    assert not result.problem, f"{result.problem}\n{result.message}"
