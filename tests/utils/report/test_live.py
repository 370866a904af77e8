"""The live table, and the choice of a display for a terminal."""

import io
import json
import subprocess
import sys

import pytest

from verl.trainer.ppo.metric_utils import describe_step
from verl.trainer.run.display import LocalDisplay, Progress
from verl.utils.report.live import LiveTable, RecordFollower, sparkline, table_rows


def append(folder, step, data, **details):
    with (folder / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": step, "data": data, **details}) + "\n")


def test_a_follower_reads_what_is_new(tmp_path, records):
    follower = RecordFollower(tmp_path)
    assert follower.read() == {}
    append(tmp_path, 1, {"x": 1.0}, samples=["much text"])
    assert follower.read() == {1: {"data": {"x": 1.0}, "workers": None}}
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "data"')  # the line is being written
        file.flush()
        assert sorted(follower.read()) == [1]
        file.write(': {"x": 2.0}}\n')
    assert follower.read()[2]["data"] == {"x": 2.0}
    records.write(tmp_path / "new", records.healthy(steps=700))
    (tmp_path / "new" / "metrics.jsonl").replace(tmp_path / "metrics.jsonl")  # a resumed run has rewritten it
    assert len(follower.read()) == 700 and 2 in follower.entries
    thinned = follower.thinned()
    assert 200 < len(thinned) <= 300 and max(thinned) == 700


def test_rows_of_the_table(records):
    assert sparkline([0.0, 7.0, 3.5]) == "▁█▅" and sparkline([2.0, 2.0]) == "▁▁"
    rows = {row[0]: row for row in table_rows(records.healthy(steps=3))}
    assert rows["seconds per step"] == ("seconds per step", "1.00", "+0", "▁▁▁")
    assert rows["sums/acc/mean@1"][1] == "0.800" and "tokens/s per worker" in rows


@pytest.mark.parametrize("width", [120, 80, 60, 44, 30])
def test_a_narrow_terminal_shows_the_latest_figures_in_full(records, width):
    console = pytest.importorskip("rich.console")
    terminal = io.StringIO()
    table = LiveTable.__new__(LiveTable)
    table._console, table._total = console.Console(file=terminal, width=width), None
    table._follower = RecordFollower(".")
    table._follower.entries = entries = records.healthy()
    table._console.print(table._drawn(entries))
    lines = terminal.getvalue().splitlines()
    rows = {row[0]: row for row in table_rows(entries)}
    for name in ("gradient norm", "tokens/s per worker"):
        (line,) = [line for line in lines if line.strip().startswith(name[:6])]
        assert f" {rows[name][1]} " in line and len(line) <= width
        if width >= 44:
            assert f" {rows[name][2]} " in line
        if width >= 60:
            assert line.strip().endswith(rows[name][3][-8:])


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_what_a_terminal_shows(tmp_path, records, monkeypatch, capsys):
    pytest.importorskip("rich")
    monkeypatch.delenv("VERL_PROGRESS", raising=False)
    assert LocalDisplay("auto", tmp_path).mode == "lines"  # pytest's standard error is no terminal
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "120")
    assert LocalDisplay("bar", tmp_path).mode == "bar" and LocalDisplay("off", tmp_path).mode == "off"
    assert LocalDisplay("auto").mode == "bar"  # no folder, no record to draw from
    display = LocalDisplay("auto", tmp_path)
    assert display.mode == "table"
    monkeypatch.setattr("verl.trainer.run.display._display", display)
    progress = Progress(50, 0, describe_step)
    records.write(tmp_path, records.slow_rank())
    display.write("a line above [not markup]")
    progress.update(40, {"timing_s/step": 1.0})
    progress.close()
    shown = terminal.getvalue()
    assert "a line above [not markup]" in shown and "step 40 of 50" in shown
    assert "reward, mean" in shown and "! straggler (step 1): rank 1 of" in shown
    display.write("below")
    assert "below" in capsys.readouterr().out
    monkeypatch.setenv("VERL_PROGRESS", "lines")
    assert LocalDisplay("table", tmp_path).mode == "lines"


def test_what_a_pipe_gets_of_a_run_that_another_process_makes(tmp_path, records, monkeypatch, capsys):
    from verl.utils.report.__main__ import main

    monkeypatch.setattr("verl.utils.report.__main__.importlib.util.find_spec", lambda name: None)  # needs no rich
    records.write(tmp_path, records.healthy(steps=3))
    assert main(["live", str(tmp_path), "--steps", "3"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert last == "the run has ended"
    assert [line.split(" | ")[0] for line in lines] == ["step 1", "step 2", "step 3"]
    assert "reward, mean 0." in lines[0] and "seconds per step 1.00" in lines[0]
    (tmp_path / "metrics.jsonl").write_bytes(b"\xff\x00 nonsense\n")
    assert main(["live", str(tmp_path), "--steps", "1"]) == 2
    assert "metrics.jsonl: not a line of a run record" in capsys.readouterr().err


def test_without_rich_there_is_a_line(tmp_path, monkeypatch):
    monkeypatch.delenv("VERL_PROGRESS", raising=False)
    monkeypatch.setattr("verl.trainer.run.display.importlib.util.find_spec", lambda name: None)
    assert LocalDisplay("table", tmp_path).mode == "lines"
    monkeypatch.setattr(sys, "stderr", Terminal())
    assert LocalDisplay("auto", tmp_path).mode == "bar"


RUN = """
import os, signal, sys
from verl.utils.process.owner import Ownership
from verl.utils.observe.record import RunRecord

folder, end = sys.argv[1:]
with Ownership() as owner:
    owner.take_folders({"trainer.default_local_dir": folder})
    print("started", flush=True)
    record = RunRecord(folder, None)
    for step, _ in enumerate(sys.stdin, 1):
        record.log({"critic/score/mean": 0.5}, step)
    if end == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("end", ["ended", "killed"])
def test_live_begins_before_the_first_step_and_ends_with_the_run(tmp_path, end):
    """Also with a run that could not say that it ends."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    live = [sys.executable, "-m", "verl.utils.report", "live", str(tmp_path)]
    with subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path), end], **pipes) as run:
        assert run.stdout.readline() == "started\n"
        with subprocess.Popen(live, **pipes) as view:
            print("step", file=run.stdin, flush=True)
            assert view.stdout.readline() == "step 1 | reward, mean 0.500\n"
            run.communicate("step\n")
            assert view.stdout.read() == "step 2 | reward, mean 0.500\nthe run has ended\n"
            assert view.wait() == 0
    done = subprocess.run(live, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.endswith("the run has ended\n")
