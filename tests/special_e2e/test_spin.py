"""The SPIN recipe: pairs, and a reference that follows the policy, in runs by its own entry."""

import math

import pytest

from tests import metrics_page

from .conftest import Run, assert_bit_for_bit, call
from .features import GAP

pytestmark = pytest.mark.full


def train(workspace, name, overrides=None, **options):
    changes = {
        "algorithm.adv_estimator": None,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 1,  # between the responses of a pair
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 8,
        "actor_rollout_ref.rollout.n": 2,
        "trainer.ref_update_freq": 3,
        "trainer.total_training_steps": 5,
        "trainer.save_freq": 2,
        "trainer.test_freq": -1,
    }
    env = {"VERL_CHECK_PHASES": "1"} | options.pop("env", {})
    return workspace.train(name, changes | (overrides or {}), env=env, module="recipe.spin.main_spin", **options)


@pytest.fixture(scope="module")
def spin(workspace):
    return train(workspace, "spin")


def test_the_reference_follows_the_policy(spin):
    """The first update of a step is measured where both are equal: log 2; the second one is not."""
    for numbers in spin.steps.values():
        assert metrics_page.unknown(set(numbers)) == set()
        assert numbers["actor/grad_norm"] > 0 and numbers["time/step"] > 0
    first, second, third, fourth, _ = (spin.steps[step]["actor/dpo_logits"] for step in range(1, 6))
    assert abs(first) < abs(second) or abs(first) < abs(third)
    assert abs(fourth) < abs(third)  # the reference has just taken the policy's weights
    assert spin.steps[1]["actor/dpo_loss"] == pytest.approx(math.log(2), abs=0.05)
    assert (spin.folder / "global_step_4/actor/reference").is_dir()
    assert not (spin.folder / "global_step_2/actor/reference").exists()  # it has the weights of the start


@pytest.mark.parametrize("killed_at", [3, 5])
def test_a_killed_run_resumes_bit_for_bit(workspace, spin, tmp_path, killed_at):
    name = f"spin-killed-{killed_at}"
    fault = {"VERL_FAULT": f"kill:update_actor:rank=0:step={killed_at}", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = train(workspace, name, env=fault, fails=True)
    assert "WorkerDiedError" in killed.output
    assert_bit_for_bit(train(workspace, name), spin, range(1, 6))


def test_it_trains_with_sglang(workspace):
    """The gap of log-probabilities is that of the trainer that recipes start from, after an update too."""
    pytest.importorskip("sglang")
    changes = {"actor_rollout_ref.rollout.name": "sglang", "trainer.total_training_steps": 2, "trainer.save_freq": -1}
    run = train(workspace, "spin-sglang", changes)
    for step in (1, 2):
        numbers = run.steps[step]
        assert metrics_page.unknown(set(numbers)) == set()
        assert numbers["actor/grad_norm"] > 0 and numbers["weight_sync/checksum_ok"] == 1
        assert numbers[GAP] < 1e-4
    assert run.steps[1]["actor/dpo_loss"] == pytest.approx(math.log(2), abs=0.05)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_example_learns(warmed_up, tmp_path, engine):
    pytest.importorskip(engine)
    steps = [
        f"actor_rollout_ref.rollout.name={engine}",
        "trainer.total_training_steps=40",
        "trainer.test_freq=40",
        "trainer.save_freq=-1",
    ]
    call(["bash", "recipe/spin/run_spin_tiny_cpu.sh", *steps], OUT_DIR=tmp_path, **warmed_up)
    run = Run(0, "", 0.0, tmp_path)
    accuracy = "val-core/openai/gsm8k/reward/mean@1"
    assert run.steps[0][accuracy] < 0.5 and run.steps[40][accuracy] >= 0.8
