"""The launching process finds a trainer that is stopped or dead, and says where it was."""

import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time

import pytest
from ray.exceptions import OutOfMemoryError

from verl.errors import LostProcessError
from verl.trainer.run import watch
from verl.trainer.run.watch import Watch, ended_within

TRAINER = """
import signal, sys
from pathlib import Path
from verl.utils.observe.activity import note_phase, noted_scorer, report_activity_to
report_activity_to(Path(sys.argv[1]))
note_phase("in phase validate, step 7")
with noted_scorer("compute_score of mine.py"):
    print("there", flush=True)
    signal.pause()
"""


@pytest.mark.parametrize(
    "number, what",
    [
        (signal.SIGSTOP, r"has not answered for \d s: it is stopped \(SIGSTOP\)"),
        (signal.SIGTERM, "was killed by SIGTERM"),
    ],
)
def test_a_lost_trainer_is_named_with_its_phase_and_scorer(monkeypatch, number, what):
    monkeypatch.setattr(watch, "WARN_AFTER_S", 0.5)  # a busy machine counts up to a second at once
    warnings = []
    watching = Watch(2.0, warnings.append)
    command = [sys.executable, "-c", TRAINER, str(watching.activity_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()
        trainer.send_signal(number)
        with pytest.raises(LostProcessError) as lost:
            watching.run(watching.is_over.wait)
        trainer.kill()
    where = "the trainer was in phase validate, step 7, in the scorer compute_score of mine.py"
    assert re.fullmatch(rf"the trainer process \(pid {trainer.pid}\) {what}; {where}", str(lost.value))
    assert len(warnings) == (number == signal.SIGSTOP)
    assert all("has not answered for" in text and "the run ends if that goes on" in text for text in warnings)


def test_a_trainer_that_ray_killed_for_lack_of_memory_is_named_with_the_reason():
    watching = Watch(9.0, print)
    command = [sys.executable, "-c", TRAINER, str(watching.activity_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()

        def talk():
            trainer.kill()
            raise OutOfMemoryError("1 worker(s) were killed due to the node running low on memory.\nObject store: -")

        with pytest.raises(LostProcessError, match="the trainer process .* was killed by SIGKILL; ") as lost:
            watching.run(talk)
    assert lost.value.__notes__ == ["1 worker(s) were killed due to the node running low on memory."]


@pytest.mark.parametrize("jump_s", [-3600, 3600])
def test_a_jump_of_the_wall_clock_moves_no_deadline(monkeypatch, jump_s):
    """In this process and, by the time of the file, in that of the trainer, whose signs of life come from here."""
    watching = Watch(2.0, print)
    command = [sys.executable, "-c", TRAINER, str(watching.activity_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as trainer:
        trainer.stdout.readline()
        true_time = time.time

        def jump():
            monkeypatch.setattr(time, "time", lambda: true_time() + jump_s)
            until = time.monotonic() + 3.0
            while time.monotonic() < until and not watching.is_over.wait(0.1):
                os.utime(watching.activity_path, (true_time() + jump_s,) * 2)
            assert not watching.is_over.is_set(), "lost while it was alive"
            trainer.send_signal(signal.SIGSTOP)
            watching.is_over.wait()

        started = time.monotonic()
        with pytest.raises(LostProcessError, match=r"has not answered for \d s"):
            watching.run(jump)
        assert time.monotonic() - started >= 4.5  # 3 s with signs of life, and nearly 2 s after the last one
        trainer.kill()


def test_the_folder_of_a_killed_run_is_removed_by_the_next_one(tmp_path, monkeypatch):
    """The run is this process until its lock is closed, which the system does when a process is killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "verl-run-without-a-mark").mkdir()
    first = Watch(math.inf, print)
    alive = Watch(math.inf, print)
    assert first.activity_path.exists()
    os.close(first._folder._handles.pop())
    second = Watch(math.inf, print)
    assert not first.activity_path.parent.exists()
    assert alive.activity_path.exists() and second.activity_path.exists()
    for each in (alive, second):
        each.run(lambda: None)
    assert [path.name for path in tmp_path.iterdir()] == ["verl-run-without-a-mark"]


def test_a_cluster_that_does_not_answer_is_lost():
    watching = Watch(1.0, print)

    def talk():
        with watching.question():
            pass
        with watching.question():
            watching.is_over.wait()

    with pytest.raises(LostProcessError, match="Ray's GCS has not answered for 1 s; no trainer on this machine"):
        watching.run(talk)
    assert not watching.is_stuck


def test_what_the_thread_returns_or_raises_is_passed_on():
    assert Watch(2.0, print).run(lambda: 3) == 3
    with pytest.raises(KeyError, match="mine"):
        Watch(2.0, print).run(lambda: {}["mine"])


def test_a_call_that_hangs_is_left_behind():
    watching = Watch(2.0, print)
    assert ended_within(5.0, lambda: 1 / 0)
    assert not ended_within(0.05, watching.is_over.wait)
    watching.is_over.set()
