import json

import pytest

from verl.utils.curves import draw_curves, main, series
from verl.utils.run_record import RunRecord, read_record


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_resumed_record_has_every_step_once(tmp_path):
    record = RunRecord(tmp_path, None)
    for step in range(6):
        record.log({"x": step}, step)
    with record.path.open("a") as file:
        file.write('{"step": 6, "da')  # cut short by a kill
    again = RunRecord(tmp_path, 3)
    assert steps_in(again.path) == [0, 1, 2, 3]
    again.log({"val": 1.0}, 3)  # validation of the resumed weights joins the line of its step
    again.log({"x": 40}, 4)
    assert steps_in(again.path) == [0, 1, 2, 3, 4]
    assert read_record(again.path) == {0: {"x": 0}, 1: {"x": 1}, 2: {"x": 2}, 3: {"x": 3, "val": 1.0}, 4: {"x": 40}}


def test_a_fresh_start_keeps_the_record_that_it_replaces(tmp_path):
    RunRecord(tmp_path, None).log({"x": 1}, 1)
    fresh = RunRecord(tmp_path, None)
    assert not fresh.path.exists() and steps_in(tmp_path / "metrics.previous.jsonl") == [1]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {}}\nnonsense\n{"step": 2, "data": {}}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        read_record(tmp_path / "metrics.jsonl")


def test_a_line_that_is_cut_inside_a_character_is_left_out(tmp_path, caplog):
    record = RunRecord(tmp_path, None)
    record.log({"x": 1}, 1, {"samples": [{"response": "größer"}]})
    whole = record.path.read_bytes()
    record.path.write_bytes(whole + whole[: whole.index("ö".encode()) + 1])
    assert read_record(record.path) == {1: {"x": 1}} and "cut short" in caplog.text
    assert steps_in(RunRecord(tmp_path, 1).path) == [1]  # and a resumed run goes on behind it


def test_curves_are_drawn_from_the_record(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    record = RunRecord(tmp_path, None)
    record.log({"val-core/gsm8k/acc/mean@1": 0.3}, 0)
    for step in range(1, 8):
        times = {"timing_s/step": 3.0, "timing_s/gen": 1.0, "timing_s/update_actor": 1.5, "timing_s/testing": 0.5}
        score = {"critic/score/mean": step / 8, "critic/score/min": 0.0, "critic/score/max": 1.0}
        record.log({**times, **score, "actor/ppo_kl": 1e-4 * step}, step)
    main([str(tmp_path)])
    picture = tmp_path / "curves.png"
    assert str(picture) in capsys.readouterr().out and picture.stat().st_size > 20_000
    from matplotlib import image

    pixels = image.imread(picture)
    assert pixels.shape[0] > 700 and pixels.shape[1] > 1000 and pixels.std() > 0.05
    assert series(read_record(record.path), "critic/score/mean") == (list(range(1, 8)), [s / 8 for s in range(1, 8)])


def test_curves_of_nothing_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="default_local_dir"):
        draw_curves(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no step"):
        draw_curves(tmp_path)
