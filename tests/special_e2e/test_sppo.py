"""The SPPO recipe: runs by its own entry."""

import pytest

from tests import metrics_page

from .conftest import Run, assert_bit_for_bit, call
from .features import GAP

pytestmark = pytest.mark.full


def train(workspace, name, overrides=None, **options):
    changes = {
        "algorithm.adv_estimator": None,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 4,
        "actor_rollout_ref.actor.optim.lr_warmup_steps": 0,
        "trainer.total_training_steps": 4,
        "trainer.save_freq": 2,
        "trainer.test_freq": -1,
    }
    env = {"VERL_CHECK_PHASES": "1"} | options.pop("env", {})
    return workspace.train(name, changes | (overrides or {}), env=env, module="recipe.sppo.main_sppo", **options)


@pytest.fixture(scope="module")
def sppo(workspace):
    return train(workspace, "sppo")


def test_it_trains(sppo):
    for numbers in sppo.steps.values():
        assert metrics_page.unknown(set(numbers)) == set()
        assert numbers["actor/grad_norm"] > 0 and numbers["actor/pg_loss"] > 0
        assert numbers["critic/advantages/min"] < 0 < numbers["critic/advantages/max"]


def test_a_killed_run_resumes_bit_for_bit(workspace, sppo, tmp_path):
    fault = {"VERL_FAULT": "kill:update_actor:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = train(workspace, "sppo-killed", env=fault, fails=True)
    assert "WorkerDiedError" in killed.output
    assert_bit_for_bit(train(workspace, "sppo-killed"), sppo, range(1, 5))


def test_it_trains_with_sglang(workspace):
    """The gap of log-probabilities is that of the trainer that recipes start from, after an update too."""
    pytest.importorskip("sglang")
    changes = {"actor_rollout_ref.rollout.name": "sglang", "trainer.total_training_steps": 2, "trainer.save_freq": -1}
    run = train(workspace, "sppo-sglang", changes)
    for step in (1, 2):
        numbers = run.steps[step]
        assert metrics_page.unknown(set(numbers)) == set()
        assert numbers["actor/grad_norm"] > 0 and numbers["weight_sync/checksum_ok"] == 1
        assert numbers[GAP] < 1e-4


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_example_learns(warmed_up, tmp_path, engine):
    pytest.importorskip(engine)
    steps = [
        f"actor_rollout_ref.rollout.name={engine}",
        "trainer.total_training_steps=30",
        "trainer.test_freq=30",
        "trainer.save_freq=-1",
    ]
    call(["bash", "recipe/sppo/run_sppo_tiny_cpu.sh", *steps], OUT_DIR=tmp_path, **warmed_up)
    run = Run(0, "", 0.0, tmp_path)
    accuracy = "val-core/openai/gsm8k/reward/mean@1"
    assert run.steps[0][accuracy] < 0.5 and run.steps[30][accuracy] >= 0.8
