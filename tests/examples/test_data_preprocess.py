"""Data preparation scripts on a local copy of the raw data, and the scorers of their rows."""

import json
import sys

import datasets
import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from examples.data_preprocess import geo3k, math_dataset
from verl.utils.dataset.vision_utils import process_image
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
    assert math_dataset.main() == 0
    rows = datasets.Dataset.from_parquet(str(out / "train.parquet"), cache_dir=str(tmp_path / "cache"))
    assert len(rows) == 3 and (out / "test.parquet").exists()
    assert rows[1]["prompt"] == [{"role": "user", "content": f"P1 {math_dataset.INSTRUCTION}"}]
    assert rows[1]["extra_info"] == {"split": "train", "index": 1} and rows[1]["ability"] == "math"
    truth = rows[1]["reward_model"]["ground_truth"]
    assert truth == r"\frac{1}{2}" and default_compute_score(rows[1]["data_source"], r"\boxed{0.5}", truth) == 1.0
    with pytest.raises(ValueError, match="no boxed answer"):
        math_dataset.extract_solution("none")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (None, "no such folder"),
        ("hello", "cannot be read"),
        ('{"problem": "P", "answer": "1"}', "split 'train': has no column 'solution', it has ['problem', 'answer']"),
        ('{"problem": "P", "solution": "two"}', "split 'train', row 0: no boxed answer in the solution 'two'"),
    ],
)
def test_raw_data_that_cannot_be_prepared(tmp_path, monkeypatch, capsys, lines, message):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    raw = tmp_path / "raw"
    if lines is not None:
        raw.mkdir()
        for split in ("train", "test"):
            (raw / f"{split}.jsonl").write_text(lines)
    words = ["math_dataset.py", "--local_dataset_path", str(raw), "--local_save_dir", str(tmp_path / "out")]
    monkeypatch.setattr(sys, "argv", words)
    assert math_dataset.main() == 2
    (told,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert message in told


def test_geo3k(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
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
    monkeypatch.setattr(sys, "argv", ["geo3k.py", "--local_dataset_path", str(raw), "--local_save_dir", str(out)])
    geo3k.main()
    table = pq.read_table(out / "train.parquet")
    row = table.slice(1, 1).to_pylist()[0]
    assert table.num_rows == 3 and pq.read_table(out / "test.parquet").num_rows == 2
    assert row["prompt"] == [{"role": "user", "content": f"<image>Find x1. {geo3k.INSTRUCTION}"}]
    assert process_image(row["images"][0]).size == (84, 56) and row["reward_model"]["ground_truth"] == "1"
    assert row["extra_info"] == {"split": "train", "index": 1, "answer": "1", "question": "<image>Find x1."}


def test_drawn_figures(tmp_path, monkeypatch):
    pytest.importorskip("mathruler")
    monkeypatch.setattr(geo3k, "NUM_TRAIN", 40)
    monkeypatch.setattr(geo3k, "NUM_SFT", 4)
    monkeypatch.setattr(geo3k, "NUM_TEST", 2)
    monkeypatch.setattr(sys, "argv", ["geo3k.py", "--synthetic", "--local_save_dir", str(tmp_path)])
    geo3k.main()
    assert {file.name for file in tmp_path.iterdir()} == {
        f"{n}.parquet" for n in ("train", "test", "sft_train", "sft_test")
    }
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        truth = row["reward_model"]["ground_truth"]
        pixels = np.asarray(process_image(row["images"][0])).astype(int)
        bright = (pixels.min(axis=2) > 100).sum() / geo3k.CELL**2  # a drawn edge belongs to the figure: a bit too large
        assert int(truth) * 0.9 < bright < int(truth) * 1.4 + 1
        assert default_compute_score(row["data_source"], rf"<think>.</think>\boxed{{{truth}}}", truth) == 1.0
    taught = pq.read_table(tmp_path / "sft_train.parquet").to_pylist()[0]
    assert taught["messages"][0]["content"] == "<image>area?" and taught["messages"][1]["content"].startswith(
        r"\boxed{"
    )
