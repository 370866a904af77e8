"""The adaptive exploration reward of InfiGUI-G1, and the screens of its small task."""

import json
import math
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from verl.utils.dataset.vision_utils import process_image
from verl.utils.import_utils import load_extern_type

RECIPE = Path(__file__).resolve().parents[2] / "recipe" / "infigui-g1"
REWARD = load_extern_type(str(RECIPE / "reward_fn.py"), "aer_gui_reward_function")
BOX = [10, 20, 30, 40]
HIT, MISS, FAR = (20, 30), (0, 0), (90, 5)


def answer(*points, around="%s"):
    candidates = json.dumps([{"point_2d": list(point), "label": "b"} for point in points])
    return f"<think>Where?</think>\n{around % candidates}"


def scored(response, truth=BOX):
    return REWARD("screens", response, truth)


@pytest.mark.parametrize(
    ("points", "accuracy"),
    [
        ([HIT], 1.0),
        ([(10, 20)], 1.0),  # the border belongs to the box
        ([(9.9, 20)], -1.0),
        ([HIT, MISS], 1 / math.sqrt(2)),
        ([MISS, HIT], 1 / 2),
        ([MISS, FAR, HIT], 1 / 3),
        ([HIT, MISS, FAR], 1 / math.sqrt(3)),
        ([MISS, FAR], -1 / 2),
        ([MISS, FAR, (1, 9)], -1 / 3),
        ([MISS, (1, 1), (7, 7)], -1.0),  # on a line
        ([HIT, (21, 30), (25, 30)], -1.0),  # also with a hit
        ([HIT, HIT, HIT], -1.0),
    ],
)
def test_candidates_by_hand(points, accuracy):
    result = scored(answer(*points))
    assert result["accuracy"] == pytest.approx(accuracy) and result["score"] == pytest.approx(1 + accuracy)
    assert result["format"] == 1.0 and result["num_candidates"] == len(points)
    assert result["acc"] == float(points[0] in (HIT, (10, 20)))


def test_another_hit_behind_the_first_costs_and_an_earlier_one_pays():
    by_rank = [scored(answer(*order))["score"] for order in ([HIT, MISS, FAR], [MISS, HIT, FAR], [MISS, FAR, HIT])]
    assert by_rank == sorted(by_rank, reverse=True) and len(set(by_rank)) == 3
    assert scored(answer(HIT))["score"] > scored(answer(HIT, (11, 21)))["score"]


@pytest.mark.parametrize("around", ["%s", "```json\n%s\n```", "```\n%s\n```", " %s \n"])
def test_forms_of_the_list(around):
    assert scored(answer(HIT, around=around))["score"] == 2.0
    assert scored(answer(HIT, around=around).removeprefix("<think>"))["score"] == 2.0  # the prompt has opened it


@pytest.mark.parametrize(
    "response",
    [
        "",
        '[{"point_2d": [20, 30]}]',
        "<think>no end [1]",
        'first <think></think>[{"point_2d": [20, 30]}]',
        "<think></think>[]",
        "<think></think>[20, 30]",
        '<think></think>[{"point_2d": [20]}]',
        '<think></think>[{"point_2d": [20, NaN]}]',
        '<think></think>[{"point_2d": [20, -Infinity]}]',
        pytest.param('<think></think>[{"point_2d": [20, %s]}]' % ("9" * 400), id="larger than any float"),
        '<think></think>[{"point_2d": [true, false]}]',
        '<think></think>[{"point_2d": "20, 30"}]',
        '<think></think>[{"point_2d": [20, 30]}] and more',
        "<think></think>" + "[" * 5000 + "]" * 5000,
    ],
)
def test_another_form_scores_zero(response):
    assert scored(response)["score"] == 0.0 and scored(response)["format"] == 0.0


def test_ways_to_write_the_box():
    box = dict(zip(("x1", "y1", "x2", "y2"), BOX, strict=True))
    for truth in (BOX, tuple(BOX), np.array(BOX), json.dumps(BOX), box, json.dumps(box)):
        assert scored(answer(HIT), truth)["score"] == 2.0
    for wrong in ("left", [1, 2, 3], [30, 20, 10, 40], {"x1": 1}, None):
        with pytest.raises(ValueError, match="must be a box"):
            scored(answer(HIT), wrong)


def test_screens(tmp_path, monkeypatch):
    main = load_extern_type(str(RECIPE / "create_dataset.py"), "main")
    monkeypatch.setitem(main.__globals__["SIZES"], "train", 20)
    monkeypatch.setitem(main.__globals__["SIZES"], "sft_train", 20)
    monkeypatch.setattr(sys, "argv", ["create_dataset.py", "--local_dir", str(tmp_path)])
    assert main() == 0
    for row in pq.read_table(tmp_path / "train.parquet").to_pylist():
        left, top, right, bottom = json.loads(row["reward_model"]["ground_truth"])
        pixels = np.asarray(process_image(row["images"][0]))
        middle = pixels[(top + bottom) // 2, (left + right) // 2]
        assert row["prompt"][0]["content"] == ("<image>red" if middle.argmax() == 0 else "<image>blue")
    taught = pq.read_table(tmp_path / "sft_train.parquet").to_pylist()
    assert all(scored(row["messages"][1]["content"])["format"] == 1.0 for row in taught)
