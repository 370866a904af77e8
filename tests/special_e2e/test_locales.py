"""Whole runs under locales without UTF-8, on paths and texts that are not ASCII."""

import json
import shutil
from pathlib import Path

import pytest

pytestmark = pytest.mark.full

SCORER = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    print("geprüft: 好")
    return {"score": float(len(solution_str) % 3), "größe": len(solution_str)}
"""


@pytest.mark.parametrize(
    "locale, name",
    [
        ({"LC_ALL": "POSIX"}, "läuf-模"),
        ({"LC_ALL": "C", "PYTHONIOENCODING": "ascii"}, "läuf-型"),
        ({"LC_ALL": "C", "PYTHONUTF8": "0"}, "plain"),
    ],
)
def test_a_run_reads_and_writes_texts_and_paths_that_are_not_ascii(workspace, locale, name):
    folder = workspace.folder / f"folder-{name}"
    model = shutil.copytree(workspace.model, folder / "model")
    (folder / "scorer.py").write_text(SCORER, encoding="utf-8")
    shutil.copy(workspace.folder / "train.parquet", folder / "train.parquet")
    changed = {
        "data.train_files": f"'{folder}/train.parquet'",
        "data.val_files": f"'{folder}/train.parquet'",
        "actor_rollout_ref.model.path": f"'{model}'",
        "actor_rollout_ref.rollout.name": "hf",
        "custom_reward_function.path": f"'{folder}/scorer.py'",
        "trainer.default_local_dir": f"'{folder}/run'",
        "trainer.rollout_data_dir": f"'{folder}/rollouts'",
        "trainer.validation_data_dir": f"'{folder}/validations'",
        "trainer.experiment_name": f"'{name}'",
        "trainer.logger": "[file,console,tensorboard]",
        "trainer.report": True,
        "trainer.total_training_steps": 1,
        "trainer.save_freq": 1,
    }
    output = workspace.train(name, changed, env=locale).output
    assert "geprüft: 好" in output or r"gepr\xfcft: \u597d" in output
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert any("größe" in key for line in lines for key in line["data"])
    rows = [json.loads(line) for line in Path(folder, "rollouts/1.jsonl").read_text(encoding="utf-8").splitlines()]
    assert all(row["größe"] == len(row["output"]) for row in rows)
    assert (folder / "run/latest_checkpointed_iteration.txt").read_text(encoding="utf-8") == "1"
