"""Whole runs whose agent loops fail and hang: they finish, and the account has every attempt."""

from collections import Counter, defaultdict

import pytest
import yaml

from verl.utils.observe.attempts import read_attempts

AGENT = "actor_rollout_ref.rollout.agent"
PROMPTS, SAMPLES = 8, 4  # of the workspace's command


@pytest.fixture
def flaky(tmp_path):
    path = tmp_path / "loops.yaml"
    path.write_text(yaml.dump([{"name": "flaky", "_target_": "tests.special_e2e.flaky_loop.FlakyLoop"}]))
    return {
        "actor_rollout_ref.rollout.mode": "async",
        f"{AGENT}.num_workers": 2,
        f"{AGENT}.agent_loop_config_path": path,
        f"{AGENT}.default_agent_loop": "flaky",
        f"{AGENT}.num_retries": 1,
        f"{AGENT}.trajectory_timeout_s": 30,
        "trainer.save_freq": 2,
    }


def by_step(run):
    lines = defaultdict(list)
    for line in read_attempts(run.folder):
        if "-train-" in line["id"]:
            lines[line["step"]].append(line)
    return lines


@pytest.mark.full
def test_a_run_goes_on_without_the_samples_that_fail(workspace, flaky):
    sampled = {"n": 4, "do_sample": True, "temperature": 1.0}  # the loop fails by the seeds of samples
    validation = {f"actor_rollout_ref.rollout.val_kwargs.{key}": value for key, value in sampled.items()}
    run = workspace.train("dropping", flaky | validation | {f"{AGENT}.on_failure": "drop"})
    assert sum(run.steps[step]["attempts/dropped"] for step in run.steps) > 0
    for step, lines in by_step(run).items():
        last = {(line["uid"], line["sample"]): line for line in lines}
        assert len(last) == PROMPTS * SAMPLES, "a trajectory is missing"
        outcomes = Counter(line["outcome"] for line in last.values())
        assert set(outcomes) <= {"ok", "dropped"}
        assert all(line["reason"] for line in lines if line["outcome"] != "ok")
        assert run.steps[step]["attempts/started"] == len(lines)
        assert run.steps[step]["attempts/dropped"] == outcomes["dropped"]
        assert run.steps[step]["attempts/retried"] == sum(line["id"].endswith("-1") for line in lines)
    validated = [line for line in read_attempts(run.folder) if "-validate-" in line["id"]]
    missing = Counter(line["step"] for line in validated if line["outcome"] == "dropped")
    assert missing
    for step in {line["step"] for line in validated}:  # a missing sample counts as a failure
        assert run.steps[step].get("val-aux/reward/failed", 0) == missing[step]


@pytest.mark.full
def test_replaced_prompts_are_the_same_after_a_resume(workspace, flaky):
    changes = flaky | {f"{AGENT}.on_failure": "replace"}
    whole = workspace.train("replacing", changes)
    assert sum(whole.steps[step]["attempts/replaced"] for step in (1, 2)) > 0
    for step, lines in by_step(whole).items():
        last = {(line["uid"], line["sample"]): line["outcome"] for line in lines}
        assert Counter(last.values())["ok"] == PROMPTS * SAMPLES, "a step trains on whole groups"
        assert whole.steps[step]["attempts/replaced"] == sum(line["outcome"] == "replaced" for line in lines)
    first = workspace.train("replacing-parts", changes | {"trainer.total_training_steps": 2})
    parts = workspace.train("replacing-parts", changes)
    assert first.folder == parts.folder
    for step in whole.steps:
        assert parts.numbers(step) == whole.numbers(step), f"step {step}"
