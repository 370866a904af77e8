import json
import math
import resource

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from verl.trainer.ppo.records import dump_generations
from verl.utils.observe.attempts import AttemptsRecord
from verl.utils.observe.curves import curve_figure, draw_curves, main
from verl.utils.observe.record import RunRecord, read_entries, read_record
from verl.utils.observe.tracking import Tracking
from verl.utils.report.flags import find_flags, points_of
from verl.utils.report.panels import STEP_PHASES


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


def test_the_last_ten_records_are_kept(tmp_path):
    """A run that dies before its first checkpoint is started again and again: its record is all that is left."""
    for start in range(1, 14):
        RunRecord(tmp_path, None).log({"x": 1}, start)
        AttemptsRecord(tmp_path, None).log(start, [{"id": "a"}])
    RunRecord(tmp_path, None)  # one that dies before its first step replaces nothing
    RunRecord(tmp_path, None)
    older = [tmp_path / f"metrics.previous.{age}.jsonl" for age in range(2, 11)]
    assert [steps_in(path) for path in (tmp_path / "metrics.previous.jsonl", *older)] == [
        [13 - age] for age in range(10)
    ]
    assert len(list(tmp_path.glob("metrics*"))) == 10 and len(list(tmp_path.glob("attempts*"))) == 11
    assert steps_in(tmp_path / "attempts.previous.2.jsonl") == [11]


def strict(text):
    """Parse JSON like a strict reader, which rejects bare NaN."""

    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


ODD = {"nan": float("nan"), "up": float("inf"), "down": -float("inf"), "array": np.array([1.0, np.nan]), "text": "none"}


def test_numbers_that_are_not_finite_are_written_as_json_and_read_back(tmp_path):
    record = RunRecord(tmp_path, None)
    record.log({**ODD, "actor/grad_norm": np.float32("nan")}, 1, {"samples": [{"score": -np.inf, "response": "NaN"}]})
    record.log({"x": torch.tensor(float("inf"))}, 2)
    record.log({"val": np.nan}, 1)  # the line is read and written again
    lines = record.path.read_text().splitlines()
    first = strict(lines[0])
    assert first["data"]["nan"] == "NaN" and first["data"]["up"] == "Infinity" and first["data"]["down"] == "-Infinity"
    assert first["samples"] == [{"score": "-Infinity", "response": "NaN"}]
    assert strict(lines[1])["data"] == {"x": "Infinity"}
    entries = read_entries(record.path)
    read = entries[1]["data"]
    assert math.isnan(read["nan"]) and math.isnan(read["val"]) and math.isnan(read["actor/grad_norm"])
    assert (read["up"], read["down"], read["text"]) == (math.inf, -math.inf, "none")
    assert read["array"][0] == 1.0 and math.isnan(read["array"][1])
    assert entries[1]["samples"][0]["response"] == "NaN"  # what a model writes stays text
    assert "not finite" in [flag.name for flag in find_flags(entries)]
    again = RunRecord(tmp_path, 2)  # a resume writes what it keeps
    assert again.path.read_text().splitlines() == lines


def test_a_record_with_bare_nan_is_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "data": {"x": NaN, "y": -Infinity, "z": 1}}\n')
    read = read_record(path)[1]
    assert math.isnan(read["x"]) and read["y"] == -math.inf and read["z"] == 1
    RunRecord(tmp_path, 1)
    assert strict(path.read_text())["data"] == {"x": "NaN", "y": "-Infinity", "z": 1}


def test_every_writer_of_lines_writes_json(tmp_path, monkeypatch):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "log.jsonl"))
    tracking = Tracking("project", "run", ["file"])
    tracking.log(ODD, step=1)
    tracking.finish()
    strict((tmp_path / "log.jsonl").read_text())
    read = read_record(tmp_path / "log.jsonl")[1]
    assert math.isnan(read["nan"]) and (read["up"], read["down"]) == (math.inf, -math.inf)
    path = dump_generations(str(tmp_path), 3, ["a"], ["NaN"], [np.nan], [np.inf], {"acc": np.array([np.nan])})
    row = strict(path.read_text())
    assert row == {"input": "a", "output": "NaN", "gts": "NaN", "score": "Infinity", "step": 3, "acc": "NaN"}


def test_a_disk_that_is_full_for_a_while_costs_the_steps_of_that_time(tmp_path, caplog):
    record = RunRecord(tmp_path, None)
    record.log({"x": 1}, 1)
    before = record.path.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 7, limits[1]))  # room for a part of a line
    try:
        record.log({"x": 2}, 2)
        record.log({"late": 1}, 1)  # which writes the file anew
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert record.path.read_bytes() == before
    assert "step 2 could not be written to the record" in caplog.text
    record.log({"x": 3}, 3)
    assert read_record(record.path) == {1: {"x": 1}, 3: {"x": 3}}


def test_a_run_resumes_beside_a_record_with_a_damaged_line(tmp_path, caplog):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {}}\nnonsense\n{"step": 2, "data": {}}\n')
    assert steps_in(RunRecord(tmp_path, 2).path) == [1, 2] and "skipped line 2" in caplog.text


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "data": {}}\nnonsense\n{"step": 2, "data": {}}\n')
    with pytest.raises(ValueError, match="metrics.jsonl, line 2"):
        read_record(tmp_path / "metrics.jsonl")


def test_a_line_that_is_cut_inside_a_character_is_left_out(tmp_path, caplog):
    record = RunRecord(tmp_path, None)
    record.log({"x": 1}, 1, {"samples": [{"response": "größer"}]})
    whole = record.path.read_bytes()
    record.path.write_bytes(whole + whole[: whole.index("ö".encode()) + 1])
    assert read_record(record.path) == {1: {"x": 1}} and "skipped the last line" in caplog.text
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
    assert points_of(read_entries(record.path), "critic/score/mean") == [(step, step / 8) for step in range(1, 8)]


@pytest.mark.parametrize("phases", [3, len(STEP_PHASES)])
def test_no_legend_covers_a_chart(phases):
    times = {f"timing_s/{name}": 1.0 for name in STEP_PHASES[:phases]} | {"timing_s/step": float(phases)}
    scores = {"critic/score/mean": 0.5, "actor/ppo_kl": 1e-4} | {f"val-core/source_{n}/acc/mean@1": 1.0 for n in "abc"}
    figure = curve_figure({step: {"data": times | scores} for step in range(1, 8)})
    FigureCanvasAgg(figure).draw()
    whole = figure.bbox
    for ax in figure.axes:
        legend, chart = ax.get_legend().get_window_extent(), ax.get_tightbbox(bbox_extra_artists=[])
        assert legend.y1 <= chart.y0 and legend.x0 >= whole.x0 and legend.y0 >= whole.y0 and legend.x1 <= whole.x1


def test_curves_of_nothing_are_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="default_local_dir"):
        draw_curves(tmp_path)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ValueError, match="holds no step"):
        draw_curves(tmp_path)


def test_the_command_says_in_one_line_what_cannot_be_drawn(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    (tmp_path / "metrics.jsonl").write_text("[1]\n{}\n")
    assert main([str(tmp_path)]) == 2
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2 and "metrics.jsonl does not exist" in told[0] and "metrics.jsonl, line 1" in told[1]
    huge = {1: {"data": {"x": 10**400, "y": float("nan")}}}
    assert points_of(huge, "x") == points_of(huge, "y") == []
