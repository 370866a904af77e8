"""Two runs started together in one folder: one trains, the other is refused, and the record is that of one run."""

import json
import os
import subprocess

import pytest

from .conftest import REPOSITORY, leftovers

ROUNDS = 20
QUICK = {
    "actor_rollout_ref.rollout.name": "hf",
    "data.val_files": None,
    "trainer.test_freq": -1,
    "trainer.save_freq": 1,
    "trainer.total_training_steps": 2,
}


@pytest.mark.full
@pytest.mark.timeout(3600)
def test_two_runs_started_together_do_not_mix(workspace):
    for number in range(ROUNDS):
        folder = workspace.folder / f"owner-{number}"
        environment = os.environ | {"PYTHONPATH": str(REPOSITORY)} | workspace.preloaded_workers
        runs = []
        for seed in (1, 2):
            private = {"trainer.seed": seed, "trainer.logger": "[console]", "trainer.experiment_name": f"seed{seed}"}
            command = workspace.command(folder.name, QUICK | private)
            options = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
            runs.append(
                subprocess.Popen(command, env=environment, cwd=workspace.folder, start_new_session=True, **options)
            )
        outputs = [run.communicate()[0] for run in runs]
        codes = [run.returncode for run in runs]
        assert sorted(codes) == [0, 2], outputs
        refused = outputs[codes.index(2)].strip().splitlines()
        assert len(refused) <= 5 and f"trainer.default_local_dir={folder}" in refused[-1], refused
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows] == [1, 2]
        assert (folder / "latest_checkpointed_iteration.txt").read_text() == "2"
        assert not (folder / ".owner").exists() and not (folder / "metrics.previous.jsonl").exists()
        assert not any(leftovers(run.pid) for run in runs)
