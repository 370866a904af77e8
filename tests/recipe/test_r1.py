"""The evaluation of reasoning models: prompts from a local copy, and the scorers."""

import base64
import json
import os
import pickle
import sys
import zlib

import datasets
import pyarrow.parquet as pq
import pytest

from recipe.r1 import data_process
from recipe.r1.reward_score import SCORERS, reward_func
from recipe.r1.tasks import TASKS, gpqa, livecodebench
from verl.utils.sandbox import isolation_problem

BOX = r"so it is \boxed{%s}"
LCB = "livecodebench/code_generation_lite"
TESTS = [{"input": f"{x}\n", "output": f"{2 * x}\n", "testtype": "stdin"} for x in (1, 5, 7)]


def prepare(monkeypatch, folder, *words):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", folder / "cache")
    monkeypatch.setattr(sys, "argv", ["data_process.py", "--local_dir", str(folder / "out"), *words])
    return data_process.main()


def rows_in(folder):
    return pq.read_table(folder / "out" / "test.parquet").to_pylist()


def hidden(value):
    return base64.b64encode(zlib.compress(pickle.dumps(value))).decode()


def code_problem(**changes):
    row = {
        "question_content": "Double it.",
        "starter_code": "",
        "public_test_cases": json.dumps(TESTS[:1]),
        "private_test_cases": hidden(json.dumps(TESTS[1:])),
        "metadata": "{}",
    }
    return row | changes


LOCAL = {
    "aime2024/train": {"ID": "I-1", "Problem": "Find x.", "Solution": "s", "Answer": 33},
    "gpqa_diamond/train": dict(zip(gpqa.COLUMNS, ("Which?", "right", "w1", "w2", "w3"), strict=True)),
    "cnmo2024/en/test": {"question": "Find y.", "answer": r"$\frac{1}{2}$"},
    "cnmo2024/zh/test": {"question": "求 y。", "answer": r"$\frac{1}{2}$"},
    "livecodebench/test": code_problem(),
}


def test_the_files_of_a_hub_repository_that_has_a_loading_script(tmp_path, monkeypatch):
    """The library reads the files of all releases and does not look at the script; here a folder is the hub."""
    hub = tmp_path / "hub"
    hub.mkdir()
    for name in ("test", "test2"):
        (hub / f"{name}.jsonl").write_text(json.dumps(code_problem(question_content=f"In {name}.")))
    load = datasets.load_dataset

    def from_the_folder(path, **options):
        files = {
            split: place.replace(f"hf://datasets/{LCB}", str(hub)) for split, place in options["data_files"].items()
        }
        return load(path, data_files=files)

    monkeypatch.setattr(datasets, "load_dataset", from_the_folder)
    assert prepare(monkeypatch, tmp_path, "--tasks", "livecodebench") == 0
    asked = [row["prompt"][0]["content"].split("\n")[0] for row in rows_in(tmp_path)]
    assert sorted(asked) == ["In test.", "In test2."]


def test_prompts_of_a_local_copy(tmp_path, monkeypatch):
    for name, row in LOCAL.items():
        file = tmp_path / "raw" / f"{name}.jsonl"
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps(row))
    assert prepare(monkeypatch, tmp_path, "--local_dataset_path", str(tmp_path / "raw")) == 0
    rows = {row["data_source"]: row for row in rows_in(tmp_path)}
    assert list(rows) == list(SCORERS)
    truth = {source: row["reward_model"]["ground_truth"] for source, row in rows.items()}
    prompt = {source: row["prompt"][0]["content"] for source, row in rows.items()}
    assert truth["Maxwell-Jia/AIME_2024"] == "33" and prompt["Maxwell-Jia/AIME_2024"].startswith("Find x.\n")
    assert f"{truth['Idavidrein/gpqa']}) right" in prompt["Idavidrein/gpqa"]
    assert prompt["opencompass/cnmo2024_zh"].startswith("求 y。")
    assert json.loads(truth[LCB]) == {"inputs": ["1\n", "5\n", "7\n"], "outputs": ["2\n", "10\n", "14\n"]}


def test_made_up_problems_have_the_same_columns_and_can_be_solved(tmp_path, monkeypatch):
    assert prepare(monkeypatch, tmp_path, "--source", "synthetic") == 0
    rows = rows_in(tmp_path)
    assert {row["data_source"] for row in rows} == set(SCORERS)
    for row in rows:
        if row["data_source"] == LCB:
            continue
        truth = row["reward_model"]["ground_truth"]
        right = f"Answer: {truth}" if row["ability"] == "science" else BOX % truth.strip("$")
        assert reward_func(row["data_source"], right, truth) == 1.0
        assert reward_func(row["data_source"], "I do not know.", truth) == 0.0
    again = tmp_path / "again"
    assert prepare(monkeypatch, again, "--source", "synthetic", "--tasks", "aime2024,livecodebench") == 0
    assert {row["data_source"] for row in rows_in(again)} == {"Maxwell-Jia/AIME_2024", LCB}


@pytest.mark.parametrize(
    ("source", "response", "truth", "score"),
    [
        ("Maxwell-Jia/AIME_2024", BOX % "033", "33", 1.0),
        ("Maxwell-Jia/AIME_2024", BOX % "34", "33", 0.0),
        ("opencompass/cnmo2024_en", BOX % "0.5", r"$\frac{1}{2}$", 1.0),
        ("opencompass/cnmo2024_zh", BOX % r"\frac{2}{1}", r"$\frac{1}{2}$", 0.0),
        ("Idavidrein/gpqa", "Answer: A, no.\n**Answer: C**", "C", 1.0),
        ("Idavidrein/gpqa", "**Answer**: (c)", "C", 1.0),
        ("Idavidrein/gpqa", "Answer: $B$", "B", 1.0),
        ("Idavidrein/gpqa", "Answer: C\nAnswer: D", "C", 0.0),
        ("Idavidrein/gpqa", "Answer: Carbon", "C", 0.0),
    ],
)
def test_scores(source, response, truth, score):
    assert reward_func(source, response, truth) == score


def test_the_order_of_the_choices_depends_on_the_index_alone():
    row = LOCAL["gpqa_diamond/train"]
    letters = [gpqa.problem(row, index)[1] for index in range(200)]
    assert letters == [gpqa.problem(row, index)[1] for index in range(200)]
    assert all(30 < letters.count(letter) < 70 for letter in "ABCD")


@pytest.mark.skipif(isolation_problem() is not None, reason="this machine cannot isolate programs")
def test_programs_must_pass_every_test():
    block = "Here:\n```python\n%s\n```"
    _, truth = livecodebench.problem(code_problem(), 0)
    assert reward_func(LCB, block % "print(2 * int(input()))", truth) == 1.0
    assert reward_func(LCB, block % "print({1: 2, 5: 10}.get(int(input())))", truth) == 0.0  # only two of three
    tests = [{"input": "3\n4", "output": "7", "testtype": "functional"}]
    raw = code_problem(
        starter_code="class Solution:\n    def add(self, x, y):",
        public_test_cases="[]",
        private_test_cases=json.dumps(tests),
        metadata=json.dumps({"func_name": "add"}),
    )
    prompt, truth = livecodebench.problem(raw, 0)
    assert "def add" in prompt
    solution = "class Solution:\n    def add(self, x, y):\n        return x %s y"
    assert reward_func(LCB, block % (solution % "+"), truth) == 1.0
    assert reward_func(LCB, block % (solution % "-"), truth) == 0.0


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


def test_a_pickle_of_tests_runs_no_code(tmp_path):
    with pytest.raises(ValueError, match="names posix.mkdir, which may run code"):
        livecodebench.private_tests(hidden(Attack(str(tmp_path / "made"))))
    assert not (tmp_path / "made").exists()
    for wrong in ("{}", "no base64", hidden("{}"), hidden("no json")):
        with pytest.raises(ValueError):
            livecodebench.private_tests(wrong)


def test_what_is_no_task_is_refused(tmp_path, monkeypatch, capsys):
    with pytest.raises(ValueError, match="no task of recipe.r1 has the data source 'mine'"):
        reward_func("mine", "", "")
    with pytest.raises(SystemExit):
        prepare(monkeypatch, tmp_path, "--tasks", "aime2024,mine")
    assert f"'mine' is no task: write all, or some of {','.join(TASKS)}" in capsys.readouterr().err
