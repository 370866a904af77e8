"""Data preparation scripts on made-up rows and on a local copy of the raw data; their rows pass our checks."""

import importlib
import json
import logging
import random
import re
import sys
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.data_preprocess import geo3k, hellaswag, math_dataset
from verl.utils.dataset.config import DataConfig
from verl.utils.dataset.files import (
    ColumnCheck,
    check_conversations,
    check_data_sources,
    check_prompt_rows,
    check_text_pairs,
    check_vision_rows,
)
from verl.utils.dataset.raw_sets import CELL, GEOMETRY3K, GSM8K
from verl.utils.dataset.vision_utils import process_image
from verl.utils.reward_score import data_source_problem, default_compute_score

ROOT = Path(__file__).parents[2]
SOLUTION = r"First $\boxed{1}$, no: the answer is $\boxed{\frac{1}{2}}$."
SCRIPTS = sorted(path.stem for path in (ROOT / "examples" / "data_preprocess").glob("*.py"))

Run = Callable[..., int]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a script with arguments as from the command line."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")

    def call(script: str, *words: object) -> int:
        monkeypatch.setattr(sys, "argv", [f"{script}.py", *map(str, words)])
        return importlib.import_module(f"examples.data_preprocess.{script}").main()

    return call


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


# ---- every script


def check_prompts(check: ColumnCheck) -> None:
    check_prompt_rows(check, "prompt", "data_source", text_only="images" not in check.table.column_names)
    check_vision_rows(check, DataConfig(), kinds=("image", "video"), prompt_key="prompt")


def check_scored(check: ColumnCheck) -> None:
    check_prompts(check)
    check_data_sources(check, "data_source", data_source_problem)


def check_chats(check: ColumnCheck) -> None:
    check_conversations(check, "messages")


def check_pairs(check: ColumnCheck) -> None:
    check_text_pairs(check, DataConfig())


def check_comparisons(check: ColumnCheck) -> None:
    for name in ("prompt", "chosen", "rejected"):
        check.text(name)


CASES = [
    ("gsm8k", ["train", "test"], check_scored),
    ("gsm8k_multiturn_w_tool", ["train", "test"], check_scored),
    ("gsm8k_tool_agent_loop", ["train", "test"], check_scored),
    ("gsm8k_multiturn_w_interaction", ["train", "test"], check_scored),
    ("gsm8k_multiturn_sft", ["train", "test"], check_chats),
    ("math_dataset", ["train", "test"], check_scored),
    ("geo3k", ["train", "test"], check_scored),
    ("geo3k_multiturn_w_tool", ["train", "test"], check_scored),
    ("hellaswag", ["train", "validation", "test"], check_prompts),
    ("full_hh_rlhf --split sft", ["train"], check_pairs),
    ("full_hh_rlhf --split rm", ["train", "test"], check_comparisons),
    ("full_hh_rlhf --split rl", ["train"], check_prompts),
    ("multiturn", ["train", "test"], check_chats),
    ("preprocess_search_r1_dataset", ["train", "test"], check_scored),
    ("dapo_multiturn_w_tool", ["train"], check_scored),
    ("aime2024_multiturn_w_tool", ["train"], check_scored),
]


@pytest.mark.parametrize(("command", "names", "check"), CASES, ids=[case[0] for case in CASES])
def test_made_up_rows_pass_the_checks_of_a_run(tmp_path, monkeypatch, run, command, names, check):
    for name in ("NUM_TRAIN", "NUM_TEST", "NUM_SFT"):
        monkeypatch.setattr(geo3k, name, 4)
    script, *words = command.split()
    words += [] if script == "multiturn" else ["--source", "synthetic"]
    option = "--local_dir" if script in ("multiturn", "preprocess_search_r1_dataset") else "--local_save_dir"
    assert run(script, *words, option, tmp_path) == 0
    written = {path.stem for path in tmp_path.glob("*.parquet")}
    assert written - {"sft_train", "sft_test"} == set(names)
    for name in names:
        path = str(tmp_path / f"{name}.parquet")
        table = pq.read_table(path)
        assert table.num_rows
        for part in ColumnCheck.over(path, table):
            check(part)
        if check is check_scored and script != "geo3k":
            assert table["prompt"][0].as_py()[-1]["content"].strip() != ""


def test_every_script_has_a_case():
    assert SCRIPTS == sorted({command.split()[0] for command, _, _ in CASES})


def test_the_same_seed_gives_the_same_rows(tmp_path, run):
    for seed, folder in ((1, "a"), (1, "b"), (2, "c")):
        words = ["--source", "synthetic", "--seed", seed, "--local_save_dir", tmp_path / folder]
        assert run("gsm8k_multiturn_w_tool", *words) == 0
    first, again, other = (rows_of(tmp_path / folder / "train.parquet") for folder in "abc")
    assert first == again != other


def write_raw(folder: Path, splits: dict[str, list[dict[str, Any]]]) -> Path:
    """Write a local copy of a raw data set, as parquet files."""
    folder.mkdir()
    for split, rows in splits.items():
        datasets.Dataset.from_list(rows).to_parquet(folder / f"{split}.parquet")
    return folder


# ---- GSM8K for several turns

PROBLEM = {"question": "How many?", "answer": "A lot: 1,000 + 234 = 1,234\n#### 1,234"}
INFO = {"split": "test", "index": 1, "answer": PROBLEM["answer"], "question": "How many?"}
TOOLS = {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "1234"}}}
QUERY = {"query": "How many?", "ground_truth": "1234"}


@pytest.mark.parametrize(
    ("script", "extra_info", "columns"),
    [
        (
            "gsm8k_multiturn_w_tool",
            {"need_tools_kwargs": True, "tools_kwargs": TOOLS, "interaction_kwargs": QUERY},
            {},
        ),
        (
            "gsm8k_tool_agent_loop",
            {"need_tools_kwargs": True, "tools_kwargs": TOOLS, "interaction_kwargs": QUERY},
            {"agent_name": "tool_agent"},
        ),
        ("gsm8k_multiturn_w_interaction", {"interaction_kwargs": {"name": "gsm8k", **QUERY}}, {}),
    ],
)
def test_gsm8k_for_several_turns(tmp_path, run, script, extra_info, columns):
    raw = write_raw(tmp_path / "raw", {"train": [PROBLEM], "test": [PROBLEM, PROBLEM]})
    assert run(script, "--local_dataset_path", raw, "--local_save_dir", tmp_path / "out") == 0
    row = rows_of(tmp_path / "out" / "test.parquet")[1]
    system, user = row.pop("prompt")
    assert system["role"] == "system" and user["role"] == "user" and user["content"].startswith("How many? ")
    assert row == {
        "data_source": "openai/gsm8k",
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "1234"},
        "extra_info": INFO | extra_info,
        **columns,
    }


def test_gsm8k_conversations(tmp_path, run):
    raw = write_raw(tmp_path / "raw", {"train": [PROBLEM], "test": [PROBLEM]})
    assert run("gsm8k_multiturn_sft", "--local_dataset_path", raw, "--local_save_dir", tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out" / "train.parquet")
    assert [message["role"] for message in row["messages"]] == ["user", "assistant"]
    assert row["messages"][1]["content"] == PROBLEM["answer"]


def test_made_up_solutions_are_right():
    rng = random.Random(3)
    for _ in range(50):
        story = GSM8K.make_up(rng)
        working, number = story["answer"].split("\n#### ")
        assert eval(working.split(" = ")[0]) == int(number.replace(",", "")) == int(working.split(">>")[1])
        drawn = GEOMETRY3K.make_up(rng)
        assert drawn["problem"] == "<image>area?" and int(drawn["answer"]) > 0
        problem = math_dataset.made_up(rng)
        terms = re.findall(r"\\frac\{(\d+)\}\{(\d+)\}|(\d+)", problem["problem"] + problem["solution"])
        first, second, total = (Fraction(int(top or whole), int(bottom or 1)) for top, bottom, whole in terms)
        assert first + second == total


# ---- the other data sets


def test_hellaswag(tmp_path, run):
    row = {
        "activity_label": "Baking [step]",
        "ctx_a": "A cook [title] opens  the oven.",
        "ctx_b": "she",
        "endings": ["sings. [substeps] Loud.", "eats."],
        "label": "1",
    }
    unlabelled = row | {"label": ""}
    raw = write_raw(tmp_path / "raw", {"train": [row, unlabelled, row], "validation": [row], "test": [unlabelled]})
    assert run("hellaswag", "--local_dataset_path", raw, "--local_save_dir", tmp_path / "out") == 0
    first, second = rows_of(tmp_path / "out" / "train.parquet")
    assert first == {
        "data_source": "Rowan/hellaswag",
        "prompt": [{"role": "user", "content": "Baking : A cook. opens the oven. She"}],
        "ability": "nlp",
        "reward_model": {
            "style": "model",
            "eval": "multiple_choice",
            "ground_truth": 1,
            "choices": ["sings. Loud.", "eats."],
        },
        "extra_info": {"split": "train", "index": 0},
    }
    assert second["extra_info"]["index"] == 2
    test = pq.read_table(tmp_path / "out" / "test.parquet")
    assert test.num_rows == 0 and test.column_names == list(first)
    with pytest.raises(ValueError, match="names none of 2 endings"):
        hellaswag.row("train", row | {"label": "2"}, 0)


def test_full_hh_rlhf(tmp_path, run):
    rows = [{"prompt": f"P{i}", "response": f"C{i}", "chosen": f"C{i}", "rejected": f"R{i}"} for i in range(8)]
    raw = write_raw(tmp_path / "raw", {"train": rows})
    out = {name: tmp_path / name for name in ("sft", "rm", "rl")}
    for name, folder in out.items():
        words = ["--split", name, "--local_dataset_path", raw, "--local_save_dir", folder]
        assert run("full_hh_rlhf", *words) == 0
    pairs = rows_of(out["sft"] / "train.parquet")
    assert len(pairs) == 16 and pairs[2:4] == [{"prompt": "P1", "response": "C1"}, {"prompt": "P1", "response": "R1"}]
    comparisons = rows_of(out["rm"] / "train.parquet") + rows_of(out["rm"] / "test.parquet")
    assert comparisons == [{"prompt": f"P{i}", "chosen": f"C{i}", "rejected": f"R{i}"} for i in range(8)]
    assert len(rows_of(out["rm"] / "test.parquet")) == 2
    prompt = rows_of(out["rl"] / "train.parquet")[3]
    assert prompt["prompt"] == [{"role": "user", "content": "P3"}] and prompt["data_source"] == "Dahoas/full-hh-rlhf"
    assert prompt["reward_model"] == {"style": "model", "ground_truth": "C3"}
    with pytest.raises(SystemExit):
        run("full_hh_rlhf", "--source", "synthetic")


def test_search_questions(tmp_path, run):
    def question(metadata: Any) -> dict[str, Any]:
        return {
            "id": "7",
            "question": "Who?",
            "data_source": "hotpotqa",
            "ability": "fact-reasoning",
            "reward_model": {"style": "rule", "ground_truth": {"target": ["Ada", "Ada L."]}},
            "metadata": metadata,
        }

    raw = write_raw(tmp_path / "raw", {"train": [question({"level": "easy"})], "test": [question({"type": 3})]})
    assert run("preprocess_search_r1_dataset", "--local_dataset_path", raw, "--local_dir", tmp_path / "out") == 0
    (row,) = rows_of(tmp_path / "out" / "test.parquet")  # whose metadata have another form than those of train
    truth = {"target": ["Ada", "Ada L."]}
    assert row["data_source"] == "searchR1_hotpotqa" and row["metadata"] == {"type": 3}
    assert row["prompt"][1]["content"].endswith("Question: Who?")
    create = {"ground_truth": truth, "question": "Who?", "data_source": "searchR1_hotpotqa"}
    assert row["extra_info"]["tools_kwargs"] == {"search": {"create_kwargs": create}}
    assert row["extra_info"]["need_tools_kwargs"] is True and row["extra_info"]["split"] == "test"
    assert default_compute_score(row["data_source"], "<answer>ada l</answer>", truth) == 1.0


@pytest.mark.parametrize("script", ["dapo_multiturn_w_tool", "aime2024_multiturn_w_tool"])
def test_competition_problems_with_a_code_interpreter(tmp_path, run, script):
    row = {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": "Find it."}],
        "ability": "MATH",
        "reward_model": {"ground_truth": "34", "style": "rule"},
        "extra_info": {"index": "abc"},
    }
    raw = write_raw(tmp_path / "raw", {"train": [row]})
    assert run(script, "--local_dataset_path", raw, "--local_save_dir", tmp_path / "out") == 0
    tools = {"code_interpreter": {"create_kwargs": {"ground_truth": "34"}}}
    extra = {"index": "abc", "need_tools_kwargs": True, "tools_kwargs": tools}
    assert rows_of(tmp_path / "out" / "train.parquet") == [row | {"extra_info": extra}]


def test_geo3k_with_a_tool(tmp_path, run):
    row = {"images": [{"bytes": b"x", "path": None}], "problem": "<image>Find y.", "answer": "3"}
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    raw = tmp_path / "raw"
    raw.mkdir()
    for split in ("train", "test"):
        datasets.Dataset.from_list([row], features=features).to_parquet(raw / f"{split}.parquet")
    words = ["--local_dataset_path", raw, "--local_save_dir", tmp_path / "out"]
    assert run("geo3k_multiturn_w_tool", *words) == 0
    (made,) = rows_of(tmp_path / "out" / "test.parquet")
    assert [message["role"] for message in made["prompt"]] == ["system", "user"] and made["images"] == row["images"]
    assert made["prompt"][1]["content"] == "<image>Find y."
    assert made["extra_info"]["tools_kwargs"] == {"calc_geo3k_reward": {"create_kwargs": {"ground_truth": "3"}}}


def test_math(tmp_path, run):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    for split, count in (("train", 3), ("test", 1)):
        lines = [json.dumps({"problem": f"P{i}", "level": "Level 1", "solution": SOLUTION}) for i in range(count)]
        (raw / f"{split}.jsonl").write_text("\n".join(lines))
    assert run("math_dataset", "--local_dataset_path", raw, "--local_save_dir", out) == 0
    rows = datasets.Dataset.from_parquet(str(out / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 3 and (out / "test.parquet").exists()
    assert rows[1]["prompt"] == [{"role": "user", "content": f"P1 {math_dataset.INSTRUCTION}"}]
    assert rows[1]["extra_info"] == {"split": "train", "index": 1} and rows[1]["ability"] == "math"
    truth = rows[1]["reward_model"]["ground_truth"]
    assert truth == r"\frac{1}{2}" and default_compute_score(rows[1]["data_source"], r"\boxed{0.5}", truth) == 1.0
    with pytest.raises(ValueError, match="no boxed answer"):
        math_dataset.extract_solution("none")


# ---- raw data that cannot be prepared

TEXT = '{"a": "b"}'


@pytest.mark.parametrize(
    ("script", "lines", "message"),
    [
        *((script, None, "no such folder") for script in SCRIPTS if script != "multiturn"),
        ("math_dataset", "hello", "cannot be read: ArrowInvalid: JSON parse error"),
        (
            "math_dataset",
            '{"problem": "P", "answer": "1"}',
            "split 'train': has no column 'solution', it has ['problem', 'answer']",
        ),
        (
            "math_dataset",
            '{"problem": "P", "solution": "two"}',
            "split 'train', row 0: no boxed answer in the solution 'two'",
        ),
        ("gsm8k_multiturn_w_tool", '{"question": "P", "answer": "two"}', "row 0: no '#### <number>' in the answer"),
        ("gsm8k_multiturn_sft", '{"question": "P", "answer": "two"}', "row 0: no '#### <number>' in the answer"),
        ("gsm8k_tool_agent_loop", TEXT, "split 'train': has no column 'question', it has ['a']"),
        ("hellaswag", TEXT, "has no split 'validation', it has ['test', 'train']"),
        ("geo3k_multiturn_w_tool", TEXT, "has no column 'problem'"),
        ("full_hh_rlhf", '{"prompt": "P", "chosen": "C", "rejected": ""}', "row 0: column 'rejected' holds no text"),
        ("preprocess_search_r1_dataset", TEXT, "cannot be read"),
        ("dapo_multiturn_w_tool", TEXT, "has no column 'data_source'"),
    ],
)
def test_raw_data_that_cannot_be_prepared(tmp_path, run, capsys, caplog, script, lines, message):
    raw = tmp_path / "raw"
    if lines is not None:
        raw.mkdir()
        for split in ("train", "test"):
            (raw / f"{split}.jsonl").write_text(lines)
    library = logging.getLogger("datasets")  # it does not propagate
    library.addHandler(caplog.handler)
    words = ["--split", "rm"] if script == "full_hh_rlhf" else []
    assert run(script, *words, "--local_dataset_path", raw, "--local_save_dir", tmp_path / "out") == 2
    library.removeHandler(caplog.handler)
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in told
    assert not caplog.messages, "the library logs what our error says"
    assert not list((tmp_path / "out").iterdir())  # nothing is half written


# ---- figures


def test_geo3k(tmp_path, run):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    figure = Image.new("RGB", (60, 40), (200, 10, 10))
    features = datasets.Features(
        {
            "images": datasets.List(datasets.Image()),
            "problem": datasets.Value("string"),
            "answer": datasets.Value("string"),
        }
    )
    for split, count in (("train", 3), ("validation", 1), ("test", 2)):
        rows = [{"images": [figure], "problem": f"<image>Find x{i}.", "answer": f"{i}"} for i in range(count)]
        datasets.Dataset.from_list(rows, features=features).to_parquet(raw / f"{split}.parquet")
    assert run("geo3k", "--local_dataset_path", raw, "--local_save_dir", out) == 0
    table = pq.read_table(out / "train.parquet")
    row = table.slice(1, 1).to_pylist()[0]
    assert table.num_rows == 3 and pq.read_table(out / "test.parquet").num_rows == 2
    assert row["prompt"] == [{"role": "user", "content": f"<image>Find x1. {geo3k.INSTRUCTION}"}]
    assert process_image(row["images"][0]).size == (84, 56) and row["reward_model"]["ground_truth"] == "1"
    assert row["extra_info"] == {"split": "train", "index": 1, "answer": "1", "question": "<image>Find x1."}


def test_drawn_figures(tmp_path, monkeypatch, run):
    pytest.importorskip("mathruler")
    monkeypatch.setattr(geo3k, "NUM_TRAIN", 40)
    monkeypatch.setattr(geo3k, "NUM_SFT", 4)
    monkeypatch.setattr(geo3k, "NUM_TEST", 2)
    assert run("geo3k", "--synthetic", "--local_save_dir", tmp_path) == 0
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{n}.parquet" for n in ("train", "test", "sft_train", "sft_test")
    }
    for row in rows_of(tmp_path / "train.parquet"):
        truth = row["reward_model"]["ground_truth"]
        pixels = np.asarray(process_image(row["images"][0])).astype(int)
        bright = (pixels.min(axis=2) > 100).sum() / CELL**2  # a drawn edge belongs to the figure: a bit too large
        assert int(truth) * 0.9 < bright < int(truth) * 1.4 + 1
        assert default_compute_score(row["data_source"], rf"<think>.</think>\boxed{{{truth}}}", truth) == 1.0
    taught = rows_of(tmp_path / "sft_train.parquet")[0]
    assert taught["messages"][0]["content"] == "<image>area?" and taught["messages"][1]["content"].startswith(
        r"\boxed{"
    )


def test_the_readme_lists_every_script():
    readme = (ROOT / "examples" / "data_preprocess" / "README.md").read_text()
    assert [name for name in SCRIPTS if f"`{name}.py`" not in readme] == []
