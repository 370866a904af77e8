"""A scorer that raises, hangs, dies and returns nonsense: a real run goes on, counts it, and leaves nothing behind."""

import json
import math

import pytest

from .conftest import Workspace, assert_bit_for_bit

SCORER = """
import os, subprocess, sys, time
def compute_score(data_source, solution_str, ground_truth, extra_info):
    kind = extra_info["index"] % 5
    if kind == 0:
        raise KeyError("no such answer")
    if kind == 1:
        return float("nan")
    if kind == 2 and len(solution_str) % 2:
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        time.sleep(600)
    if kind == 3 and len(solution_str) % 2:
        os._exit(9)
    return {"score": len(set(solution_str)) / 16, "acc": True}
"""


@pytest.mark.parametrize("manager", ["naive", pytest.param("prime", marks=pytest.mark.full)])
def test_a_run_survives_its_scorer(workspace: Workspace, manager: str) -> None:
    """The run ends with code 0 and no process of it is left, which ``train`` asserts; every failure is counted."""
    path = workspace.folder / "unruly.py"
    path.write_text(SCORER)
    overrides = {
        "custom_reward_function.path": path,
        "reward_model.reward_manager": manager,
        "reward_model.scoring.timeout_s": 0.5,
        "reward_model.scoring.failure_score": -1,
        "trainer.total_training_steps": 1,
        "trainer.rollout_data_dir": workspace.folder / "unruly" / "rollouts",
        "actor_rollout_ref.rollout.name": "hf",
    }
    run = workspace.train("unruly", overrides)
    rows = [json.loads(line) for line in (run.folder / "rollouts/1.jsonl").read_text().splitlines()]
    failed, numbers = [row for row in rows if row["reward_failure"]], run.steps[1]
    assert numbers["reward/failed"] == len(failed) > 0
    assert numbers["reward/failed_ratio"] == len(failed) / len(rows)
    assert {row["score"] for row in failed} == {-1.0} and all(row["score"] > 0 for row in rows if row not in failed)
    assert {"raised", "invalid"} <= {row["reward_failure"] for row in failed} <= {"raised", "invalid", "timed out"}
    assert all(map(math.isfinite, numbers.values()))
    assert numbers["val-aux/reward/failed"] >= 3  # of the rows 0 to 5, those of the first two kinds
    assert "the first response that could not be scored" in run.output and "KeyError: 'no such answer'" in run.output


BROKEN_LATER = """
import os
def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(LOG, "a") as log:
        log.write("x")
    if os.path.exists(BROKEN) and os.path.getsize(LOG) > FIRST:
        raise KeyError(f"no answer to {solution_str!r}")
    return len(set(solution_str)) / 16
"""


@pytest.mark.parametrize("goes_on", [False, pytest.param(True, marks=pytest.mark.full)])
def test_a_run_ends_when_nothing_of_a_step_can_be_scored(workspace: Workspace, goes_on: bool) -> None:
    """It ends in that step with reasons and a checkpoint of the step before, from which it goes on bit for bit."""
    name = f"broken_later_{goes_on}"
    broken = workspace.folder / "broken"
    path = workspace.folder / "broken_later.py"
    path.write_text(
        BROKEN_LATER.replace("BROKEN", repr(str(broken)))
        .replace("LOG", repr(str(workspace.folder / "calls")))
        .replace("FIRST", "32")
    )
    overrides = {
        "custom_reward_function.path": path,
        "trainer.total_training_steps": 2,
        "trainer.save_freq": 10,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "actor_rollout_ref.rollout.name": "hf",
    }
    whole = workspace.train("never_broken", overrides) if goes_on else None
    (workspace.folder / "calls").unlink(missing_ok=True)
    broken.touch()
    cut = workspace.train(name, overrides, fails=True)
    assert "step 2: none of the" in cut.output and "the scorer raised KeyError: " in cut.output
    assert (cut.folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    broken.unlink()
    if whole is not None:
        assert_bit_for_bit(workspace.train(name, overrides), whole, [2])
