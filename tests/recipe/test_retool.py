"""The recipe retool: rows of the hub, the conversations of its supervised data, its interpreter and its score."""

import asyncio
import json
import random

import pandas as pd
import pytest
from omegaconf import OmegaConf
from transformers import AutoTokenizer

from examples.tiny_model import byte_tokenizer
from recipe.retool.powers import make_task
from recipe.retool.retool import (
    INSTRUCTION,
    CustomRLHFDataset,
    compute_score,
    shows_last_value,
    without_fence,
)
from recipe.retool.retool_sft_preprocess import QUESTION, conversation, made_up
from verl.errors import DataError
from verl.experimental.agent_loop.tool_parser import get_tool_parser
from verl.tools.calls import execute_call
from verl.tools.utils.tool_registry import initialize_tools_from_config, read_tools_file
from verl.utils.dataset.sft_dataset import MultiTurnSFTDataset
from verl.utils.sandbox import isolation_problem

CONFIG = OmegaConf.create({"max_prompt_length": 256, "filter_overlong_prompts": False, "return_raw_chat": True})

# ---- rows


def dataset(*paths):
    return CustomRLHFDataset([str(path) for path in paths], byte_tokenizer(), CONFIG)


def test_the_forms_of_rows(tmp_path):
    """DAPO's file, and a folder of each of the hub's two forms; one data set reads them together."""
    ours = {
        "data_source": "math_dapo",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}],
        "reward_model": {"style": "rule", "ground_truth": "2"},
        "extra_info": {"index": "7"},
    }
    pd.DataFrame([ours]).to_parquet(tmp_path / "dapo.parquet")
    for name, row in (
        ("AIME_2024", {"ID": "I-1", "Problem": "2+2?", "Answer": 4}),
        ("aime_2025", {"problem": "3+3?", "answer": "6"}),
    ):
        (tmp_path / name).mkdir()
        pd.DataFrame([row]).to_parquet(tmp_path / name / "train.parquet")
    rows = list(dataset(tmp_path / "dapo.parquet", tmp_path / "AIME_2024", tmp_path / "aime_2025"))
    assert [row["data_source"] for row in rows] == ["math_dapo", "aime_2024", "aime_2025"]
    assert [row["reward_model"]["ground_truth"] for row in rows] == ["2", "4", "6"]
    assert [row["raw_prompt"][-1]["content"] for row in rows] == [f"{n}+{n}?{INSTRUCTION}" for n in (1, 2, 3)]
    assert {row["agent_name"] for row in rows} == {"tool_agent"}
    assert rows[0]["raw_prompt"][0]["content"] == "Be brief." and rows[0]["extra_info"]["index"] == "7"


@pytest.mark.parametrize(
    ("row", "error"),
    [({"text": "1+1?"}, "has the columns"), ({"prompt": "1+1?", "reward_model": "2"}, "row 0: is no prompt")],
)
def test_other_rows_are_refused(tmp_path, row, error):
    pd.DataFrame([row]).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=error):
        dataset(tmp_path / "rows.parquet")


def test_a_name_that_is_nothing(tmp_path):
    with pytest.raises(DataError, match=r"nothing: cannot be read: .*name a data set of the hub"):
        dataset(tmp_path / "nothing")


def codes_of(message):
    return [call["function"]["arguments"]["code"] for call in message.get("tool_calls", ())]


def test_supervised_conversations(tmp_path):
    """Each pair of code and output is a call and its answer; the model is trained on what it says itself."""
    raw = {
        "messages": [
            {"content": f"<answer>.\n\n{QUESTION}\nWhat?\n\nRemember to place the final answer in the last part"},
            {
                "content": "First.\n<code>\n```python\nx = 1\n```\n</code>\n<interpreter>\n1\n</interpreter>\n"
                "Then.<code>y</code><interpreter></interpreter>So\n<answer>\n\\boxed{2}\n</answer>"
            },
        ]
    }
    row = conversation("train", raw, 0)
    said = [
        (m["role"], m["content"], *(c["function"]["arguments"]["code"] for c in m.get("tool_calls", ())))
        for m in row["messages"]
    ]
    assert said == [
        ("user", f"What?{INSTRUCTION}"),
        ("assistant", "First.", "x = 1"),
        ("tool", "1"),
        ("assistant", "Then.", "y"),
        ("tool", ""),
        ("assistant", "So\n\\boxed{2}"),
    ]
    assert [tool["function"]["name"] for tool in json.loads(row["tools"])] == ["code_interpreter"]
    broken = {"messages": [raw["messages"][0], {"content": "<code>x</code> and no output"}]}
    assert conversation("train", broken, 0) is None

    made = [conversation("train", made_up(random.Random(seed)), seed) for seed in range(3)]
    pd.DataFrame(made).to_parquet(tmp_path / "rows.parquet")
    template = (
        "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% for c in m.tool_calls or () %}"
        "[{{ c.function.arguments.code }}]{% endfor %}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    tokenizer = byte_tokenizer(template)
    item = MultiTurnSFTDataset(str(tmp_path / "rows.parquet"), tokenizer, {"max_length": 256})[0]
    trained = tokenizer.decode(item["input_ids"][item["loss_mask"].bool()])
    (code,) = codes_of(made[0]["messages"][1])
    assert trained == f"I add them.[{code}]<|end|>{made[0]['messages'][3]['content']}<|end|>"


# ---- the tool


def test_programs():
    assert without_fence("Run:\n```python\nx = 1\n```\nDone") == "x = 1\n" and without_fence("x = 1") == "x = 1"
    same = ["x = 1", "def f():\n    pass", "1 +", "", "\0"]
    assert [shows_last_value(code) for code in same] == same


@pytest.mark.parametrize(
    ("code", "printed"),
    [
        ("x = 2\nx, 3", "(2, 3)\n"),
        ("print(3)", "3\n"),
        ("é = 'ä'; é", "ä\n"),
        ("[].append(1)", ""),
        ("(1 +\n 2)  # three", "3\n"),
        ("x = 3\nx;", "3\n"),
    ],
)
def test_the_value_of_the_last_line_is_shown(capsys, code, printed):
    exec(shows_last_value(code), {})
    assert capsys.readouterr().out == printed


@pytest.mark.skipif(isolation_problem() is not None, reason="this machine cannot isolate code")
def test_the_interpreter_answers_a_call():
    (item,) = read_tools_file("recipe/retool/sandbox_fusion_tool_config.yaml")
    assert item.rest["tool_schema"]["function"]["name"] == "code_interpreter"
    (tool,) = initialize_tools_from_config("recipe/retool/powers/tools.yaml")

    async def ask(arguments):
        instance, _ = await tool.create()
        return await execute_call(tool, instance, arguments)

    assert asyncio.run(ask({"code": "```python\nx = 48**39\nx % 97\n```"})).response.text == "70"
    assert asyncio.run(ask({"code": 7})).outcome == "bad_arguments"


# ---- the score


@pytest.mark.parametrize(
    ("response", "turns", "score"),
    [
        ("\\boxed{70}", 2, 1.0),
        ("\\boxed{71}", 2, -1.0),
        ("\\boxed{71}", None, -1.0),
        ("no box: 70", 4, -0.9),  # -1 + 0.05 * 2
        ("\\boxed{71}", 8, -0.7),
        ("\\boxed{71}", 20, -0.6),  # not more, however many calls
        ("\\boxed{71} \\boxed{70}", 20, 1.0),
    ],
)
def test_score(response, turns, score):
    result = compute_score("math_dapo", response, "70", {"num_turns": turns})
    assert result["score"] == pytest.approx(score) and result["acc"] == (score == 1.0)


# ---- the task of the CPU script


def test_the_tiny_task(tmp_path, monkeypatch):
    """Half of the supervised rows run code, half of those with the numbers of the question; the calls are readable."""
    monkeypatch.setattr("sys.argv", ["make_task.py", "--save-dir", str(tmp_path)])
    assert make_task.main() == 0
    asked = {name: pd.read_parquet(tmp_path / "data" / f"{name}.parquet") for name in ("train", "test", "sft_train")}
    questions = {name: {row[0]["content"] for row in asked[name]["prompt"]} for name in ("train", "test")}
    assert not questions["train"] & questions["test"] and len(questions["test"]) == 128
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    assert [len(tokenizer.encode(text, add_special_tokens=False)) for text in (make_task.HEAD, make_task.TAIL)] == [
        1,
        1,
    ]
    parser = get_tool_parser("hermes", tokenizer)
    called = right = 0
    for talk in asked["sft_train"]["messages"][:200]:
        question = talk[0]["content"].removesuffix(INSTRUCTION)
        if len(talk) == 4:
            (found,) = parser.parse(talk[1]["content"])[1]
            code = json.loads(found.arguments)["code"]
            value = str(eval(code.removeprefix("print")))
            assert value == talk[2]["content"] and talk[3]["content"] == f"\\boxed{{{value}}}"
            called += 1
            right += code == f"print({question.replace('^', '**')}%97)"
    assert called == 100 and 50 <= right < 60
    x, y = map(int, asked["test"]["prompt"][0][0]["content"].split("^"))
    assert asked["test"]["reward_model"][0]["ground_truth"] == str(x**y % 97)
