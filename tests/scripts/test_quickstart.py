"""What the quick start refuses before it does anything."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("options", "checkpoint", "message"),
    [
        ([], 20, "quickstart: {out}/grpo holds a run with the overrides 'algorithm.gamma=0.9'; now they are ''"),
        (["--", "algorithm.gamma=0.8"], 20, "now they are 'algorithm.gamma=0.8'"),
        (["--seed", "2"], 20, "{out} holds a run with --seed 1 --workers 1; now it is --seed 2 --workers 1"),
        (["--steps", "many"], 0, "--steps needs a number, got 'many'"),
        # goes on, to an environment that is not there: the first training had no checkpoint, or had the same overrides
        (["--", "algorithm.gamma=0.8"], 0, "setup: VERL_NO_INSTALL=1 and no environment at /nowhere"),
        (["--steps", "60", "--", "algorithm.gamma=0.9"], 20, "setup: VERL_NO_INSTALL=1 and no environment at /nowhere"),
    ],
)
def test_a_run_of_other_settings_is_not_taken_for_this_one(tmp_path, options, checkpoint, message):
    out = tmp_path / "out of (1)"
    (out / "grpo").mkdir(parents=True)
    (out / "settings").write_text("--seed 1 --workers 1\n")
    (out / "grpo.overrides").write_text("algorithm.gamma=0.9\n")
    if checkpoint:
        (out / "grpo" / "latest_checkpointed_iteration.txt").write_text(str(checkpoint))
    env = {"PATH": os.environ["PATH"], "VERL_NO_INSTALL": "1", "VERL_SKIP_CHECKS": "1", "VERL_VENV": "/nowhere"}
    command = ["bash", "scripts/quickstart.sh", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode != 0 and message.format(out=out) in done.stdout + done.stderr
