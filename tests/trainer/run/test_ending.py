"""What a signal leaves of a run is told in one line, and the time to save has an end."""

import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from verl.trainer.run import ending as module
from verl.trainer.run.ending import Ending, Grace
from verl.utils.checkpoint import write_tracker_atomically
from verl.utils.checkpoint.files import remove_tracker
from verl.utils.observe.record import RECORD_NAME
from verl.utils.process.interrupts import command_line

COMMAND = ["python", "-m", "verl.trainer.main_ppo", "a='b c'", "trainer.resume_mode=disable"]


def record(folder: Path, *steps: int) -> None:
    """Write the record that a run has after these steps, as a new file."""
    new = folder / "new"
    new.write_text("".join(f'{{"step": {step}, "data": {{}}}}\n' for step in steps) + '{"step": 9, "da')
    new.replace(folder / RECORD_NAME)


def save(folder: Path, step: int) -> None:
    (folder / f"global_step_{step}").mkdir(exist_ok=True)
    write_tracker_atomically(folder, step)


@pytest.mark.parametrize(
    ("mode", "before", "trains", "saves", "told"),
    [
        ("auto", None, [], None, "there is no checkpoint, no full step is lost; start again with: "),
        ("auto", None, [1, 2], None, "there is no checkpoint, steps 1 to 2 are lost; start again with: "),
        ("auto", None, [1, 2], 2, "the last checkpoint is {}/global_step_2, no full step is lost; go on with: "),
        ("auto", 2, [], None, "the last checkpoint is {}/global_step_2, no full step is lost; go on with: "),
        ("auto", 2, [1, 2, 3], None, "the last checkpoint is {}/global_step_2, step 3 is lost; go on with: "),
        ("disable", 5, [], None, "there is no checkpoint, no full step is lost; start again with: "),
        ("disable", 5, [1], None, "there is no checkpoint, step 1 is lost; start again with: "),
        ("disable", 5, [1, 2, 3], 1, "the last checkpoint is {}/global_step_1, steps 2 to 3 are lost; go on with: "),
        ("resume_path", 5, [], None, "the last checkpoint is {}/global_step_4, no full step is lost; go on with: "),
        ("resume_path", 5, [1, 2, 3, 4, 5], None, "the last checkpoint is {}/global_step_4, step 5 is lost; go on"),
        ("resume_path", 5, [1, 2, 3, 4, 5], 4, "the last checkpoint is {}/global_step_4, step 5 is lost; go on"),
        ("disable", 5, [1], "removed", "there is no checkpoint, step 1 is lost; start again with: "),
    ],
)
def test_the_last_line(tmp_path, monkeypatch, mode, before, trains, saves, told):
    """The record and the checkpoints of an earlier run are not those of this one, unless it resumes from them."""
    monkeypatch.setattr(sys, "orig_argv", [*COMMAND[:-1], f"+trainer.resume_mode={mode}"])
    if before is not None:
        record(tmp_path, *range(1, before + 4))
        save(tmp_path, before)
    path = f"{tmp_path}/global_step_4" if mode == "resume_path" else None
    ending = Ending(tmp_path, mode, path, report=False, save_s=None)
    if trains:
        record(tmp_path, *trains)
    if saves == "removed":  # the tracker, when the run started
        remove_tracker(tmp_path)
    elif saves is not None:
        save(tmp_path, saves)
    line = ending.last_line()
    assert line.startswith("interrupted: " + told.format(tmp_path)), line
    chosen = [*COMMAND[:-1], f"+trainer.resume_mode={mode}"]
    if mode != "auto" and isinstance(saves, int):
        chosen = [*COMMAND[:-1], "trainer.resume_mode=auto", "trainer.resume_from_path=null"]
    assert shlex.split(line.partition(" with: ")[2]) == chosen
    assert ending.has_unsaved_step() == (" lost; " in line and "no full step" not in line)


def test_the_command_is_one_line_that_a_shell_reads(monkeypatch):
    words = ["echo", "a b", "it's", "two\nlines of 'text' \\n", "\u00e9\t", "HF_TOKEN=secret"]
    monkeypatch.setattr(sys, "orig_argv", words)
    line = command_line()
    assert "\n" not in line and "secret" not in line
    script = line.replace("echo", r"printf '%s\0'", 1)
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env={"LC_ALL": "C.UTF-8"}, check=True)
    assert done.stdout.split("\0")[:-1] == [*words[1:-1], "HF_TOKEN=***"]


def test_a_folder_of_another_machine_is_not_judged(tmp_path):
    ending = Ending(tmp_path, "auto", None, report=False, save_s=None, is_here=False)
    assert ending.has_unsaved_step()
    assert ending.last_line().startswith(f"interrupted: {tmp_path} is on the machine of the trainer; go on with: ")


def test_only_the_first_sigterm_begins_the_time_to_save(monkeypatch):
    monkeypatch.setattr(module._thread, "start_new_thread", lambda *_: None)
    assert not Grace().begin() and not Grace(1.0, lambda: False).begin()
    grace = Grace(1.0)
    assert [grace.begin(), grace.has_begun, grace.begin()] == [True, True, False]
    grace = Grace(1.0, takes_all=True)
    assert [grace.begin(), grace.begin()] == [True, True]
    grace.close()
    assert not grace.begin()


ENDING = """
import subprocess, sys, time
from pathlib import Path
from verl.trainer.run import ending
from verl.utils.process.interrupts import catch_signals, going_on
folder, seconds, ending.OUTPUTS_S = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
of_run = ending.Ending(folder, "auto", None, report=True, save_s=seconds)
(folder / "metrics.jsonl").write_text('{"step": 1, "data": {"critic/score/mean": 1.0}}\\n')
if sys.argv[4] == "hang":
    of_run.start_outputs = lambda: print("writes", flush=True) or [subprocess.Popen(["sleep", "100000"])]
catch_signals()
grace = ending.Grace(seconds)
try:
    with going_on(grace.begin):
        print("up", flush=True)
        while not grace.has_begun:
            time.sleep(0.01)
        print("saves", flush=True)
        while True:
            time.sleep(0.01)
except KeyboardInterrupt:
    sys.exit(ending.end_interrupted(of_run, grace))
"""


def end(folder: Path, signals: str, save_s: float = 1e5, outputs_s: float = 1e5, how: str = "") -> tuple[int, str]:
    """Send signals to a run, each when it has written the line after its name; return its code and what it writes."""
    command = [sys.executable, "-c", ENDING, str(folder), str(save_s), str(outputs_s), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        for word in signals.split():
            name, _, line = word.partition("@")
            assert process.stdout.readline() == f"{line}\n"
            process.send_signal(signal.Signals[name])
        output = process.communicate()[0]
    return process.returncode, output.strip()


LOST = "there is no checkpoint, step 1 is lost; start again with: "


def test_ctrl_c_ends_with_report_and_curves_and_one_line(tmp_path):
    code, output = end(tmp_path, "SIGINT@up")
    *written, empty, last = output.splitlines()
    assert code == 130 and not empty and last.startswith(f"interrupted: {LOST}")
    names = {"curves": "curves.png", "report": "report.html"}
    assert sorted(written) == [f"{kind}: {tmp_path / name}" for kind, name in names.items()]
    assert {path.name for path in tmp_path.iterdir()} == {*names.values(), RECORD_NAME}


@pytest.mark.parametrize(
    ("signals", "save_s", "outputs_s", "last"),
    [
        ("SIGINT@up SIGINT@writes", 1e5, 1e5, "interrupted"),  # another signal leaves report and curves out
        ("SIGINT@up SIGTERM@writes", 1e5, 1e5, "interrupted"),
        ("SIGTERM@up SIGTERM@saves", 1e5, 1e5, "terminated"),
        ("SIGTERM@up SIGINT@saves", 1e5, 1e5, "interrupted"),
        ("SIGTERM@up", 0.01, 1e5, "terminated"),  # the time to save ends
    ],
)
def test_a_run_in_a_hurry_writes_one_line(tmp_path, signals, save_s, outputs_s, last):
    code, output = end(tmp_path, signals, save_s, outputs_s, "hang")
    last_line = output.removeprefix("saves").strip()
    assert last_line.startswith(f"{last}: {LOST}") and "\n" not in last_line
    assert code == {"interrupted": 130, "terminated": 143}[last]


def test_report_and_curves_have_a_limit(tmp_path):
    code, output = end(tmp_path, "SIGINT@up", outputs_s=0.01, how="hang")
    assert code == 130 and output.splitlines()[0] == "writes"
