"""Scripts of data preparation, over raw files of the published form."""

import json

import pandas as pd
import pytest

from examples.data_preprocess import math_dataset
from verl.utils.reward_score import default_compute_score


def test_math(tmp_path, monkeypatch, capsys):
    solutions = [r"We have $x=\boxed{\frac{1}{2}}$.", r"First \boxed{3}, so it is \boxed{\text{even}}."]
    rows = [{"problem": f"p{i}", "level": "Level 5", "type": "Algebra", "solution": s} for i, s in enumerate(solutions)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["--local_dataset_path", str(tmp_path), "--local_dir", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["math_dataset.py", *arguments])
    math_dataset.main()
    assert "--local_dir is deprecated" in capsys.readouterr().err
    for split in ("train", "test"):
        table = pd.read_parquet(tmp_path / "out" / f"{split}.parquet")
        assert [row["ground_truth"] for row in table["reward_model"]] == [r"\frac{1}{2}", r"\text{even}"]
        assert table["prompt"][1][0] == {"role": "user", "content": f"p1 {math_dataset.INSTRUCTION}"}
        assert [row["index"] for row in table["extra_info"]] == [0, 1]
        for row, solution in zip(table.itertuples(), solutions, strict=True):
            assert default_compute_score(row.data_source, solution, row.reward_model["ground_truth"]) == 1
    with pytest.raises(ValueError, match="no boxed answer"):
        math_dataset.extract_solution("the answer is 3")
