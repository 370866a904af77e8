"""OpenMathReasoning: conversations and prompts of local copies, and the scorer."""

import importlib.util
import json
import sys
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest

from recipe.open_math_reasoning import prepare_eval_dataset
from recipe.open_math_reasoning.compute_score import compute_score_data_source
from recipe.open_math_reasoning.problems import prompt_of

RECIPE = Path(__file__).resolve().parents[2] / "recipe" / "open_math_reasoning"


def load_sft():
    """Load the script whose name is no module's."""
    file = RECIPE / "prepare_nvidia-OpenMathReasoning_sft.py"
    spec = importlib.util.spec_from_file_location("prepare_open_math_sft", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def prepare(monkeypatch, script, folder, *words):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.setattr(sys, "argv", ["prepare.py", "--local_save_dir", str(folder / "out"), *words])
    return script.main()


def write(file, *rows):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(map(json.dumps, rows)))


def test_conversations_of_problems_with_an_answer(tmp_path, monkeypatch):
    rows = [
        {"problem": f"P{i}", "generated_solution": f"S{i}", "problem_type": kind}
        for i, kind in enumerate(["has_answer_extracted", "converted_proof", "has_answer_extracted"])
    ]
    write(tmp_path / "raw" / "data" / "cot-00000-of-00001.jsonl", *rows)
    card = "---\nconfigs:\n- config_name: default\n  data_files:\n  - split: cot\n    path: data/cot-*\n---\n"
    (tmp_path / "raw" / "README.md").write_text(card)
    assert prepare(monkeypatch, load_sft(), tmp_path, "--local_dataset_path", str(tmp_path / "raw")) == 0
    found = pq.read_table(tmp_path / "out" / "cot_dataset.parquet").to_pylist()
    assert [[turn["content"] for turn in row["messages"]] for row in found] == [
        [prompt_of("P0"), "S0"],
        [prompt_of("P2"), "S2"],
    ]
    assert [turn["role"] for turn in found[0]["messages"]] == ["user", "assistant"]


def test_prompts_of_both_years(tmp_path, monkeypatch):
    write(tmp_path / "raw" / "aime24" / "test.jsonl", {"problem": "P", "solution": r"so \boxed{204}"})
    write(tmp_path / "raw" / "aime25" / "test.jsonl", {"problem": "Q", "answer": "70"})
    assert prepare(monkeypatch, prepare_eval_dataset, tmp_path, "--local_dataset_path", str(tmp_path / "raw")) == 0
    rows = pq.read_table(tmp_path / "out" / "eval_dataset.parquet").to_pylist()
    assert [(row["data_source"], row["reward_model"]["ground_truth"]) for row in rows] == [
        ("aime24", "204"),
        ("aime25", "70"),
    ]
    assert rows[1]["prompt"] == [{"role": "user", "content": prompt_of("Q")}]


def test_made_up_rows_have_right_solutions(tmp_path, monkeypatch):
    assert prepare(monkeypatch, load_sft(), tmp_path, "--source", "synthetic") == 0
    assert prepare(monkeypatch, prepare_eval_dataset, tmp_path, "--source", "synthetic") == 0
    taught = pq.read_table(tmp_path / "out" / "cot_dataset.parquet").to_pylist()
    solutions = {row["messages"][0]["content"]: row["messages"][1]["content"] for row in taught}
    asked = pq.read_table(tmp_path / "out" / "eval_dataset.parquet").to_pylist()
    known = [row for row in asked if row["prompt"][0]["content"] in solutions]
    assert len(known) > len(asked) / 2
    for row in known:
        truth = row["reward_model"]["ground_truth"]
        assert compute_score_data_source(row["data_source"], solutions[row["prompt"][0]["content"]], truth) == 1.0


@pytest.mark.parametrize(("response", "score"), [(r"\boxed{204}", 1.0), (r"\boxed{204.0}", 1.0), ("204", 0.0)])
def test_the_score(response, score):
    assert compute_score_data_source("aime24", response, "204") == score
