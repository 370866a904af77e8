"""The DAPO recipe: dynamic sampling, overlong penalty and clip-higher in a run by its own entry."""

import json
import os
import shutil
from collections import defaultdict
from pathlib import Path

import pytest

from .test_signals import assert_saves_and_goes_on

REPOSITORY = Path(__file__).parents[2]
PROMPTS, SAMPLES, LENGTH, BUFFER, FACTOR = 4, 4, 16, 8, 0.5
DAPO = {
    "data.train_batch_size": PROMPTS,
    "data.gen_batch_size": 6,
    "algorithm.filter_groups.enable": True,
    "algorithm.filter_groups.metric": "acc",
    "algorithm.filter_groups.max_num_gen_batches": 20,
    "reward_model.overlong_buffer.enable": True,
    "reward_model.overlong_buffer.len": BUFFER,
    "reward_model.overlong_buffer.penalty_factor": FACTOR,
    "reward_model.overlong_buffer.log": True,
    "custom_reward_function.path": REPOSITORY / "tests/special_e2e/rewards.py",
    "custom_reward_function.name": "two_letters",
    "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 4,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.actor.clip_ratio_c": 10.0,
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.rollout.n": SAMPLES,
    "trainer.total_training_steps": 4,
    "trainer.test_freq": -1,
}


def train(workspace, name, overrides=None, **options):
    dumps = {"trainer.rollout_data_dir": workspace.folder / name / "rollouts"}
    env = {"VERL_CHECK_PHASES": "1"} | options.pop("env", {})
    return workspace.train(name, DAPO | dumps | (overrides or {}), env=env, module="recipe.dapo.main_dapo", **options)


def groups_of(run, step):
    """Return the rows of a step by the index of their prompt, in the order of the file."""
    groups = defaultdict(list)
    for line in (run.folder / "rollouts" / f"{step}.jsonl").read_text().splitlines():
        row = json.loads(line)
        groups[row["index"]].append(row)
    return groups


@pytest.fixture(scope="module")
def dapo(workspace):
    return train(workspace, "dapo", {"trainer.save_freq": 2})


def test_every_step_is_filled_with_prompts_whose_responses_differ(dapo):
    for step, numbers in dapo.steps.items():
        groups = groups_of(dapo, step)
        assert len(groups) == PROMPTS and all(len(rows) == SAMPLES for rows in groups.values())
        assert all(len({row["acc"] for row in rows}) == 2 for rows in groups.values())
        drawn, dropped, surplus = (numbers[f"train/num_prompts_{name}"] for name in ("drawn", "dropped", "surplus"))
        assert drawn == 6 * numbers["train/num_gen_batches"] and drawn - dropped - surplus == PROMPTS
        assert all(index % 3 for index in groups)  # the others have no right answer
        assert numbers["actor/grad_norm"] > 0
    assert any(numbers["train/num_gen_batches"] > 1 for numbers in dapo.steps.values())
    assert any(numbers["train/num_prompts_surplus"] for numbers in dapo.steps.values())


def test_responses_near_the_limit_are_punished(dapo):
    """The penalty is the one of DAPO (section 3.4) for the number of tokens of the response."""
    rows = [row for step in dapo.steps for group in groups_of(dapo, step).values() for row in group]
    assert all(row["score"] == pytest.approx(row["acc"] + row["overlong_reward"]) for row in rows)
    assert min(row["overlong_reward"] for row in rows) == -FACTOR  # of a response that was cut off
    assert all(-row["overlong_reward"] * BUFFER / FACTOR in range(BUFFER + 1) for row in rows)
    assert any(row["overlong"] for row in rows) and all(row["overlong"] == (row["overlong_reward"] < 0) for row in rows)


@pytest.mark.full
def test_a_killed_run_says_so_and_resumes_bit_for_bit(workspace, dapo, tmp_path):
    fault = {"VERL_FAULT": "kill:update_actor:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = train(workspace, "dapo-killed", {"trainer.save_freq": 2}, env=fault, fails=True)
    message = killed.output[killed.output.rindex("\nError: ") :]
    assert "WorkerDiedError" in message and "update_actor" in message and "step 3" in message
    resumed = train(workspace, "dapo-killed", {"trainer.save_freq": 2})
    assert sorted(resumed.steps) == [1, 2, 3, 4]
    for step in resumed.steps:
        assert resumed.numbers(step) == dapo.numbers(step)
        assert groups_of(resumed, step) == groups_of(dapo, step)


@pytest.mark.full
def test_a_run_saves_after_sigterm(workspace, dapo):
    """In a step that has drawn one of its batches."""
    assert_saves_and_goes_on(workspace, DAPO, dapo, module="recipe.dapo.main_dapo")


@pytest.mark.full
def test_the_upper_limit_of_the_ratio_is_its_own(workspace, dapo):
    """Only the second update of a step moves away from the sampled policy: the first step begins alike."""
    other = train(workspace, "dapo-clip", {"actor_rollout_ref.actor.clip_ratio_high": 0.2})
    assert groups_of(other, 1) == groups_of(dapo, 1)
    assert other.steps[1]["actor/pg_clipfrac"] > dapo.steps[1]["actor/pg_clipfrac"] > 0


@pytest.mark.full
def test_two_workers_choose_the_same_prompts(workspace, dapo):
    two = train(workspace, "dapo-two", {"trainer.n_gpus_per_node": 2})
    assert groups_of(two, 1) == groups_of(dapo, 1)


@pytest.mark.full
def test_the_run_ends_with_advice_or_with_its_data(workspace):
    never = {"custom_reward_function.name": "never", "algorithm.filter_groups.max_num_gen_batches": 2}
    failed = train(workspace, "dapo-never", never, fails=True)
    message = failed.output[failed.output.rindex("\nError: ") :]
    assert "max_num_gen_batches=2: 2 draws kept 0 prompts of 12, a step needs data.train_batch_size=4" in message
    assert "in training step 1 of 4" in message
    epoch = {"trainer.total_epochs": 1, "trainer.total_training_steps": None, "trainer.save_freq": 100}
    run = train(workspace, "dapo-epoch", epoch | {"trainer.test_freq": 100})
    last = max(run.steps)
    assert f"the run ends after step {last} of at most 10" in run.output
    assert (run.folder / f"global_step_{last}").exists()
    assert "val-core/letters/acc/mean@1" in run.steps[last] and last < 10


@pytest.mark.full
def test_a_copied_recipe_trains_with_its_own_code(workspace, tmp_path):
    copy = tmp_path / "recipe/mine"
    shutil.copytree(REPOSITORY / "recipe/dapo", copy)
    trainer = copy / "dapo_ray_trainer.py"
    head = "        groups = self.run_config.algorithm.filter_groups\n"
    changed = trainer.read_text().replace(head, f'{head}        metrics["mine/changed"] = 1\n')
    trainer.write_text(changed)
    path = os.pathsep.join([str(tmp_path), str(REPOSITORY)])
    run = workspace.train(
        "dapo-copy",
        DAPO | {"trainer.total_training_steps": 1},
        env={"PYTHONPATH": path},
        module="recipe.mine.main_dapo",
    )
    assert run.steps[1]["mine/changed"] == 1
