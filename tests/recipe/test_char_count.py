"""The task of counting characters: its files and its reward."""

import sys

import pyarrow.parquet as pq
import pytest

from recipe.char_count import create_dataset
from recipe.char_count.reward_function import char_count_reward_function


def create(monkeypatch, *words):
    monkeypatch.setattr(sys, "argv", ["create_dataset.py", *map(str, words)])
    return create_dataset.main()


def test_the_files_hold_the_counts(tmp_path, monkeypatch):
    assert (
        create(monkeypatch, "--data_path", tmp_path, "--total_number", 200, "--min_length", 3, "--max_length", 6) == 0
    )
    words = {}
    for split in ("train", "test"):
        rows = pq.read_table(tmp_path / "rl" / f"{split}.parquet").to_pylist()
        taught = pq.read_table(tmp_path / "sft" / f"{split}.parquet").to_pylist()
        words[split] = {row["extra_info"]["word"] for row in rows}
        assert len(rows) == len(taught) == len(words[split])
        for row, pair in zip(rows, taught, strict=True):
            word, character = row["extra_info"]["word"], row["extra_info"]["character"]
            truth = row["reward_model"]["ground_truth"]
            assert 3 <= len(word) <= 6 and truth == str(sum(letter == character for letter in word))
            assert row["prompt"] == [{"role": "user", "content": pair["prompt"]}] and row["data_source"] == "char_count"
            assert f"How many {character} are there in {word}?" == pair["prompt"]
            assert char_count_reward_function("char_count", pair["response"], truth) == 1.0
    assert not words["train"] & words["test"]
    assert len(words["test"]) == round(0.1 * (len(words["train"]) + len(words["test"])))


def test_a_solution_counts_letter_by_letter():
    assert create_dataset.solve("noon", "n") == r"n1 o1 o1 n2 \boxed{2}"


@pytest.mark.parametrize(
    ("response", "score"),
    [(r"\boxed{3}", 1.0), (r"\boxed{2} \boxed{3}", 1.0), (r"\boxed{13}", 0.0), (r"\boxed{3.0}", 0.0), ("3", 0.0)],
)
def test_the_reward_is_exact(response, score):
    assert char_count_reward_function("char_count", response, "3") == score


@pytest.mark.parametrize("words", [("--min_length", 6, "--max_length", 5), ("--total_number", 3), ("--min_length", 0)])
def test_wrong_arguments(tmp_path, monkeypatch, capsys, words):
    with pytest.raises(SystemExit):
        create(monkeypatch, "--data_path", tmp_path, *words)
    assert words[0] in capsys.readouterr().err
