"""Whole runs: they learn, they resume bit for bit, and their layouts agree."""

import math
import re

import pandas as pd
import pytest

from tests import metrics_page
from verl.utils.observe.record import read_entries
from verl.utils.report.panels import expected_panels

from .changing_trainer import LEARNING_RATE
from .conftest import assert_bit_for_bit
from .driver_without_cuda import SAID
from .held import GO
from .test_signals import HELD_RUN, end_held, go_on

TWO_WORKERS = {"trainer.n_gpus_per_node": 2, "actor_rollout_ref.rollout.tensor_model_parallel_size": 2}
PPO = {
    "algorithm.adv_estimator": "gae",
    "critic.ppo_micro_batch_size_per_gpu": 8,
    "critic.optim.lr": 1e-3,
    "critic.model.use_remove_padding": True,
    "critic.model.enable_gradient_checkpointing": False,
    "algorithm.use_kl_in_reward": True,
    "algorithm.kl_ctrl.type": "adaptive",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
    "algorithm.rollout_is_threshold": 2.0,
    "algorithm.rollout_is": True,
}
BY_THE_DATA = {
    "data.filter_overlong_prompts": True,
    "trainer.total_training_steps": None,
    "trainer.total_epochs": 1,
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
    "critic.optim.lr_scheduler_type": "cosine",
    "critic.optim.min_lr_ratio": 0.5,
}
"""The filter decides on the number of steps, which the schedules need, while the workers start."""


@pytest.fixture(scope="module")
def grpo(workspace):
    return workspace.train("grpo", {"trainer.save_freq": 2, "trainer.report": True})


@pytest.fixture(scope="module")
def ppo(workspace):
    return workspace.train("ppo", ppo_overrides(workspace), module="tests.special_e2e.driver_without_cuda")


def ppo_overrides(workspace):
    half = workspace.folder / "half.parquet"  # four batches
    pd.read_parquet(workspace.folder / "train.parquet")[:32].to_parquet(half)
    own = {"critic.model.path": workspace.model, "data.train_files": half, "trainer.save_freq": 2}
    return TWO_WORKERS | PPO | BY_THE_DATA | own


def test_grpo_runs_and_rollout_and_trainer_agree(grpo):
    """fp32: the engine's log-probabilities and the trainer's differ by rounding, after updates that moved them."""
    assert sorted(grpo.steps) == [1, 2, 3, 4]
    for step in range(1, 5):
        numbers = grpo.steps[step]
        assert numbers["training/rollout_log_prob_diff_max"] < 1e-4
        assert numbers["actor/grad_norm"] > 0
        assert numbers["weight_sync/checksum_ok"] == 1
        assert all(map(math.isfinite, numbers.values()))
    assert (grpo.folder / "curves.png").stat().st_size > 10_000
    assert "val-core/letters/reward/mean@1" in grpo.steps[4]


def test_no_process_of_the_driver_initialises_cuda(ppo):
    """With a critic, a reference, checkpoints and validation; the launching process and the trainer refuse it."""
    assert SAID in ppo.output and len(ppo.steps) == 4


def test_a_run_leaves_a_report(grpo):
    """Every picture of a run of one worker without a KL and shared prefixes, and samples of each step."""
    page = (grpo.folder / "report.html").read_text()
    figures = set(re.findall(r'<figure id="(\w+)"', page))
    entries = read_entries(grpo.folder / "metrics.jsonl")
    assert figures >= {panel.name for panel in expected_panels(entries)} - {"kl", "workers", "mfu", "computed"}
    for step in range(1, 5):
        assert sum(entries[step]["response_length"]["counts"]) == 32
        assert {sample["kind"] for sample in entries[step]["samples"]} == {"best", "worst"}
        assert {"prepare", "generate", "shape", "weights", "random state"} <= entries[step]["phases"].keys()
        assert {"generation", "update_actor"} <= entries[step]["workers"]["actor_rollout"][0]["seconds"].keys()


def test_ppo_with_a_critic_on_two_workers_with_tensor_parallel_generation(ppo):
    for step in range(1, 5):
        numbers = ppo.steps[step]
        assert numbers["training/rollout_log_prob_diff_max"] < 1e-4
        assert numbers["critic/grad_norm"] > 0
        for name in ("kl", "k3_kl", "log_ppl_diff", "log_ppl_abs_diff"):
            assert abs(numbers[f"mismatch/mismatch_{name}"]) < 1e-4
        for name in ("mean", "min", "max", "p25", "p50", "p99", "eff_sample_size", "seq_min", "seq_max"):
            assert abs(numbers[f"mismatch/rollout_is_{name}"] - 1) < 1e-4
        assert numbers["mismatch/rollout_is_std"] < 1e-4
        wave = (1 + math.cos(math.pi * (step - 1) / 4)) / 2
        assert numbers["actor/lr"] == pytest.approx(1e-3 * wave, abs=1e-9)
        assert numbers["critic/lr"] == pytest.approx(1e-3 * (0.5 + 0.5 * wave))
    assert sorted(ppo.steps) == [1, 2, 3, 4]
    assert ppo.steps[4]["critic/vf_loss"] < ppo.steps[1]["critic/vf_loss"]


def test_every_metric_of_a_run_is_on_the_page(grpo, ppo):
    """``docs/metrics.md`` names all of them, and those that it promises are there."""
    for run in (grpo, ppo):
        for step, numbers in run.steps.items():
            assert metrics_page.unknown(set(numbers)) == set(), (run.folder.name, step)
    sampled = "`rollout.calculate_log_probs`"
    assert metrics_page.promised("always", sampled) <= set(grpo.steps[1])
    there = ("always", "with a critic", sampled, "`rollout_is_threshold`")
    assert metrics_page.promised(*there) <= set(ppo.steps[1])


@pytest.mark.full  # trainer/ppo/test_resources.py decides which workers start again
def test_what_a_trainer_of_a_fork_writes_to_the_configuration_reaches_the_workers(workspace, grpo, ppo):
    """They have started before it exists, and start again; those of other runs do not."""
    module = "tests.special_e2e.changing_trainer"
    run = workspace.train("changing", {"trainer.total_training_steps": 1}, module=module)
    assert run.steps[1]["actor/lr"] == LEARNING_RATE
    again = "the workers start again"
    assert f"{again}, because actor_rollout_ref.actor.optim.lr was changed" in run.output
    assert again not in grpo.output and again not in ppo.output


@pytest.mark.parametrize("kind", [pytest.param("grpo", marks=pytest.mark.full), "ppo"])
def test_a_run_goes_on_bit_for_bit_after_sigterm_and_after_the_death_of_a_worker(
    workspace, request, kind, tmp_path, monkeypatch
):
    """SIGTERM in step 3 saves step 2; SIGKILL of a worker in the update of step 4 leaves a message and a regular save.

    The step is left each time, and its batch drawn again. A slow worker takes part in the last of three runs.
    """
    whole = request.getfixturevalue(kind)
    overrides, rank = ({}, 0) if kind == "grpo" else (ppo_overrides(workspace), 1)
    name = f"{kind}-struck"
    line = end_held(workspace, workspace.command(name, overrides | HELD_RUN), name)
    saved = workspace.folder / name / "global_step_2"
    assert line.startswith(f"terminated: the last checkpoint is {saved}, no full step is lost; go on with: "), line
    fault = {"VERL_FAULT": f"kill:update_actor:rank={rank}:step=4", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    (workspace.folder / name / GO).touch()
    going = {"HELD_RUN": str(workspace.folder / name)}
    killed = workspace.train(name, overrides | HELD_RUN | {"trainer.save_freq": 3}, env=fault | going, fails=True)
    assert "update_actor" in (tmp_path / "fault").read_text()
    assert_names_the_death(killed.output, rank, "update_actor", 4)
    assert sorted(killed.steps) == [1, 2, 3]
    assert (killed.folder / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert (killed.folder / "error.log").exists()
    monkeypatch.setenv("VERL_FAULT", f"slow:update_actor:rank={rank}")
    monkeypatch.setenv("VERL_FAULT_FILE", str(tmp_path / "slow"))
    resumed = go_on(workspace, line, name)
    assert (tmp_path / "slow").exists()
    assert [path.name for path in killed.folder.glob("error*")] == ["error.previous.log"]
    assert sorted(resumed.steps) == sorted(whole.steps)
    assert_bit_for_bit(resumed, whole, whole.steps)


def assert_names_the_death(output: str, rank: int, phase: str, step: int) -> None:
    """Hold the last message of a run to what it must tell."""
    message = output[output.rindex("\nError: ") :]
    assert "WorkerDiedError" in message
    assert f"rank {rank}" in message or f"rank={rank}" in message, message
    assert phase in message, message
    assert f"step {step}" in message or f"step={step}" in message, message
