"""Scripts that prepare data, on a local copy of the raw data set, and the scorers that their rows go to."""

import json
import sys

import datasets
import pytest

from examples.data_preprocess import math_dataset
from verl.utils.reward_score import default_compute_score

SOLUTION = r"First $\boxed{1}$, no: the answer is $\boxed{\frac{1}{2}}$."


def test_math(tmp_path, monkeypatch):
    raw, out = tmp_path / "raw", tmp_path / "out"
    raw.mkdir()
    for split, count in (("train", 3), ("test", 1)):
        lines = [json.dumps({"problem": f"P{i}", "level": "Level 1", "solution": SOLUTION}) for i in range(count)]
        (raw / f"{split}.jsonl").write_text("\n".join(lines))
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    words = ["math_dataset.py", "--local_dataset_path", str(raw), "--local_save_dir", str(out)]
    monkeypatch.setattr(sys, "argv", words)
    math_dataset.main()
    rows = datasets.Dataset.from_parquet(str(out / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 3 and (out / "test.parquet").exists()
    assert rows[1]["prompt"] == [{"role": "user", "content": f"P1 {math_dataset.INSTRUCTION}"}]
    assert rows[1]["extra_info"] == {"split": "train", "index": 1} and rows[1]["ability"] == "math"
    truth = rows[1]["reward_model"]["ground_truth"]
    assert truth == r"\frac{1}{2}" and default_compute_score(rows[1]["data_source"], r"\boxed{0.5}", truth) == 1.0
    with pytest.raises(ValueError, match="no boxed answer"):
        math_dataset.extract_solution("none")
