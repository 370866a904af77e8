"""The PRIME recipe: a reward model that learns, and a filter of prompts, in a run by its own entry."""

import json

import pytest

from tests import metrics_page

from .conftest import Run, assert_bit_for_bit, call

PROMPTS, SAMPLES = 4, 4


def train(workspace, name, overrides=None, **options):
    changes = {
        "algorithm.adv_estimator": "rloo",
        "data.train_batch_size": PROMPTS,
        "data.oversample_factor": 2.0,
        "custom_reward_function.name": "two_letters",
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
        "actor_rollout_ref.rollout.n": SAMPLES,
        "reward_model.micro_batch_size_per_gpu": 4,
        "reward_model.model.optim.lr": 1e-3,
        "reward_model.reward_manager": "naive",
        "trainer.rollout_data_dir": workspace.folder / name / "rollouts",
        "trainer.total_training_steps": 3,
        "trainer.test_freq": -1,
    }
    env = {"VERL_CHECK_PHASES": "1"} | options.pop("env", {})
    return workspace.train(name, changes | (overrides or {}), env=env, module="recipe.prime.main_prime", **options)


@pytest.fixture(scope="module")
def prime(workspace):
    return train(workspace, "prime", {"trainer.save_freq": 2})


def test_the_reward_model_learns_and_scores_tokens(prime):
    for step, numbers in prime.steps.items():
        assert metrics_page.unknown(set(numbers)) == set()
        assert numbers["reward_model/grad_norm"] > 0 and numbers["actor/grad_norm"] > 0
        assert numbers["reward_model/lr"] == 1e-3
        assert 0 < numbers["reward_model/dpo_loss"] < 1
        assert -0.7 < numbers["reward_model/reward"] < 1.01  # the largest sum of a response is 1
        rows = [json.loads(line) for line in (prime.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines()]
        assert len(rows) == PROMPTS * SAMPLES and len({row["index"] for row in rows}) == PROMPTS
    # Two updates on the responses of a step: the model then knows more of them.
    assert prime.steps[1]["reward_model/dpo_acc_abs"] > prime.steps[1]["reward_model/dpo_acc_abs_before"]
    assert (prime.folder / "global_step_2" / "reward").is_dir()


@pytest.mark.full
def test_a_killed_run_resumes_bit_for_bit(workspace, prime, tmp_path):
    fault = {"VERL_FAULT": "kill:update_reward_model:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = train(workspace, "prime-killed", {"trainer.save_freq": 2}, env=fault, fails=True)
    assert "WorkerDiedError" in killed.output and "reward_model" in killed.output
    resumed = train(workspace, "prime-killed", {"trainer.save_freq": 2})
    assert_bit_for_bit(resumed, prime, [1, 2, 3])


@pytest.mark.full
def test_two_workers_keep_the_same_prompts_and_normalise_over_both(workspace):
    """One update on the whole batch, because workers cut their own rows into mini-batches."""
    whole = {"reward_model.mini_batch_size": PROMPTS, "trainer.total_training_steps": 1}
    one = train(workspace, "prime-one", whole).steps[1]
    two = train(workspace, "prime-two", whole | {"trainer.n_gpus_per_node": 2}).steps[1]
    for name in ("acc", "reward_model/reward", "reward_model/dpo_loss", "critic/advantages/max"):
        assert two[name] == pytest.approx(one[name], rel=1e-3), name


@pytest.mark.full
@pytest.mark.parametrize(
    "changes",
    [
        {"loss_type": "dpo", "update": "reverse"},
        {"loss_type": "bon_rm", "update": "after"},
        {"ref_type": "policy", "ref_path": "null", "update": "none"},
    ],
    ids=lambda changes: changes.get("loss_type", "policy"),
)
def test_other_losses_and_references_train(workspace, changes):
    overrides = {f"reward_model.model.{key}": value for key, value in changes.items()}
    run = train(workspace, f"prime-{changes['update']}", overrides | {"trainer.total_training_steps": 2})
    assert all(numbers["actor/grad_norm"] > 0 for numbers in run.steps.values())
    assert ("reward_model/grad_norm" in run.steps[1]) == (changes["update"] != "none")


@pytest.mark.full
@pytest.mark.timeout(1800)
def test_the_example_learns(warmed_up, tmp_path):
    steps = ["trainer.total_training_steps=15", "trainer.test_freq=15", "trainer.save_freq=-1"]
    call(["bash", "recipe/prime/run_prime_tiny_cpu.sh", *steps], OUT_DIR=tmp_path, **warmed_up)
    run = Run(0, "", 0.0, tmp_path)
    accuracy = "val-core/openai/gsm8k/reward/mean@1"
    assert run.steps[0][accuracy] < 0.5 and run.steps[15][accuracy] >= 0.6
