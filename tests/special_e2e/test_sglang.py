"""Whole runs with SGLang: rollout and trainer agree, and a death of any process of the engine ends the run by name."""

import math
import re
import time

import psutil
import pytest

from .conftest import is_of_session, leftovers
from .test_async_rollout import ASYNC
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
        gaps = {part: numbers[f"training/rollout_log_prob_diff_{part}"] for part in ("mean", "max")}
        print(f"{kind}, step {step}: mean {gaps['mean']:.1e}, max {gaps['max']:.1e}")
        assert gaps["mean"] < 1e-5 and gaps["max"] < 1e-4
        assert numbers["actor/grad_norm"] > 0
        assert numbers["weight_sync/checksum_ok"] == 1 and numbers["weight_sync/unverified_tensors"] == 0
        assert all(map(math.isfinite, numbers.values()))
    assert "val-core/letters/reward/mean@1" in run.steps[2]


SERVER = r"rollout server sglang_server_0"
DEATHS = {
    "scheduler": ("sglang::scheduler", rf"{SERVER}: its engine has died: process scheduler_0 was ended by SIGKILL"),
    "detokenizer": ("sglang::detokenizer", rf"{SERVER}: its engine has died: process detokenizer was ended by SIGKILL"),
    "owner": ("HybridSGLangServer", rf"{SERVER}: its process has died|no rollout server is left: .*ActorDiedError"),
}


@pytest.mark.full
@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("victim", DEATHS)
def test_a_death_ends_the_run_by_name(workspace, victim, mode):
    """At once, or in the next phase that needs the engine; nothing is left behind."""
    title, told = DEATHS[victim]
    changes = SGLANG | (ASYNC if mode == "async" else {}) | {"actor_rollout_ref.rollout.skip_tokenizer_init": False}
    name = f"sglang-{victim}-{mode}"
    with workspace.start(name, changes | {"trainer.total_training_steps": 1000, "trainer.test_freq": -1}) as process:
        deadline = time.monotonic() + 300
        record = workspace.folder / name / "metrics.jsonl"
        while not (record.exists() and record.read_text().count("\n") > 1) and time.monotonic() < deadline:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        found = [each for each in psutil.process_iter(["cmdline"]) if title in " ".join(each.info["cmdline"] or [])]
        (culprit,) = [each for each in found if is_of_session(each, process.pid)]
        culprit.kill()
        killed_at = time.monotonic()
        output = process.communicate(timeout=180)[0]
    assert process.returncode != 0
    assert time.monotonic() - killed_at < 60
    message = output[output.rindex("\nError: ") :]
    assert re.search(told, message), message
    assert not leftovers(process.pid)
