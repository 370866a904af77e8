"""A scorer that raises, hangs, dies and returns nonsense: a real run goes on, counts it, and leaves nothing behind."""

import json
import math

import pytest

from .conftest import Workspace, assert_bit_for_bit

ENGINE = "examples.rollout_engine.min_p.MinPRollout"
SCORER = """
import os, subprocess, sys, time
from pathlib import Path
def compute_score(data_source, solution_str, ground_truth, extra_info):
    if Path(RECORD).exists() and Path(RECORD).read_bytes().count(b"\\n") == 2:
        raise KeyError("no answer at all")  # in the third step
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
    return {"score": (1 + len(set(solution_str))) / 17, "acc": True}
"""


@pytest.mark.parametrize("manager", ["naive", pytest.param("prime", marks=pytest.mark.full)])
def test_a_run_survives_its_scorer_until_nothing_of_a_step_can_be_scored(workspace: Workspace, manager: str) -> None:
    """Every failure is counted; the run ends in the third step with reasons and a checkpoint of the second one.

    No process of it is left, which ``train`` asserts. It samples with an engine from outside the package: the trainer
    computes the log-probabilities that the engine reports, also with the weights of the first update.
    """
    folder = workspace.folder / f"unruly_{manager}"
    path = workspace.folder / "unruly.py"
    path.write_text(SCORER.replace("RECORD", repr(str(folder / "metrics.jsonl"))))
    overrides = {
        "custom_reward_function.path": path,
        "reward_model.reward_manager": manager,
        "reward_model.scoring.timeout_s": 0.5,
        "reward_model.scoring.failure_score": -1,
        "data.max_response_length": 8,
        "trainer.total_training_steps": 3,
        "trainer.test_freq": 2,
        "trainer.save_freq": 10,
        "trainer.rollout_data_dir": folder / "rollouts",
        "actor_rollout_ref.rollout.name": ENGINE,
        "actor_rollout_ref.rollout.temperature": 1.0,
    }
    run = workspace.train(folder.name, overrides, fails=True)
    assert sorted(run.steps) == [1, 2]
    for step, numbers in run.steps.items():
        rows = [json.loads(line) for line in (folder / f"rollouts/{step}.jsonl").read_text().splitlines()]
        failed = [row for row in rows if row["reward_failure"]]
        assert numbers["reward/failed"] == len(failed) > 0
        assert numbers["reward/failed_ratio"] == len(failed) / len(rows)
        assert {row["score"] for row in failed} == {-1.0} and all(row["score"] > 0 for row in rows if row not in failed)
        assert {"raised", "invalid"} <= {row["reward_failure"] for row in failed} <= {"raised", "invalid", "timed out"}
        assert all(map(math.isfinite, numbers.values()))
        assert numbers["training/rollout_probs_diff_max"] < 1e-4
        assert numbers["actor/grad_norm"] > 0
    assert run.steps[2]["val-aux/reward/failed"] >= 3  # of the rows 0 to 5, those of the first two kinds
    assert "the first response that could not be scored" in run.output and "KeyError: 'no such answer'" in run.output
    message = run.output[run.output.rindex("\nError: ") :]
    assert "step 3: none of the 32" in message and "the scorer raised KeyError: 'no answer at all'" in message, message
    assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"


BROKEN_LATER = """
import os
def compute_score(data_source, solution_str, ground_truth, extra_info):
    with open(LOG, "a") as log:
        log.write("x")
    if os.path.exists(BROKEN) and os.path.getsize(LOG) > FIRST:
        raise KeyError(f"no answer to {solution_str!r}")
    return len(set(solution_str)) / 16
"""


@pytest.mark.full
def test_a_run_whose_scorer_was_mended_goes_on_bit_for_bit(workspace: Workspace) -> None:
    """It goes on from the checkpoint of the step before the one that could not be scored."""
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
    whole = workspace.train("never_broken", overrides)
    (workspace.folder / "calls").unlink()
    broken.touch()
    cut = workspace.train("broken_later", overrides, fails=True)
    assert (cut.folder / "latest_checkpointed_iteration.txt").read_text() == "1"
    broken.unlink()
    assert_bit_for_bit(workspace.train("broken_later", overrides), whole, [2])
