"""A folder has one owner: real processes contend for it, die and stop."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from verl.base_config import ConfigError
from verl.utils.process.owner import LOCK_NAME, Ownership, Process

KEY = "trainer.default_local_dir"
CONTENDER = f"""
import sys
from verl.base_config import ConfigError
from verl.utils.process.owner import Ownership

for folder in sys.stdin:
    with Ownership() as owner:
        try:
            owner.take_folders({{"{KEY}": folder.strip()}})
            print("taken", flush=True)
        except ConfigError as error:
            print(error, flush=True)
        sys.stdin.readline()
    print("freed", flush=True)
"""


@contextmanager
def contender() -> Iterator[subprocess.Popen[str]]:
    """A process that takes the folders it reads, each until it reads another line."""
    with subprocess.Popen(
        [sys.executable, "-c", CONTENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def tell(process: subprocess.Popen[str], line: object = "") -> None:
    assert process.stdin is not None
    process.stdin.write(f"{line}\n")
    process.stdin.flush()


def answer(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def refusal(folder: Path) -> str | None:
    """Try to take a folder; return the message if that is refused."""
    with Ownership() as mine:
        try:
            mine.take_folders({KEY: str(folder)})
        except ConfigError as error:
            return str(error)
    return None


@pytest.fixture(scope="module")
def ended() -> Process:
    """A process of this machine that has ended."""
    code = "from verl.utils.process.owner import *; import json; print(json.dumps(asdict(Process.this())))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return Process(**json.loads(done.stdout))


def write(folder: Path, process: Process) -> None:
    (folder / LOCK_NAME).write_text(json.dumps(asdict(process)))


def test_of_two_runs_started_together_one_is_refused(tmp_path):
    with contender() as first, contender() as second:
        for number in range(20):
            folder = tmp_path / str(number)
            for each in (first, second):
                tell(each, folder)
            said, refused = sorted((answer(first), answer(second)))
            assert said == "taken" and refused.startswith(f"{KEY}={folder}: ")
            assert "belongs to a run that is alive" in refused or "another run is starting" in refused
            for each in (first, second):
                tell(each)
            assert answer(first) == answer(second) == "freed"
            assert not list(folder.iterdir())


def test_a_stopped_owner_is_alive_and_a_killed_one_gives_way_at_once(tmp_path):
    with contender() as other:
        tell(other, tmp_path)
        assert answer(other) == "taken"
        other.send_signal(signal.SIGSTOP)
        assert f"alive, process {other.pid}: write another path" in (refusal(tmp_path) or "")
        other.kill()
        os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # it stays a zombie: nobody has asked for its code
        assert refusal(tmp_path) is None


def test_a_child_does_not_keep_the_folder_of_its_parent(tmp_path):
    with Ownership() as mine:
        mine.take_folders({KEY: str(tmp_path)})
        child = os.fork()
        if not child:
            os.kill(os.getpid(), signal.SIGSTOP)
            os._exit(0)
        os.waitid(os.P_PID, child, os.WSTOPPED)
        mine._close()  # as if this process had died: nothing frees the file
    assert refusal(tmp_path) is None
    os.kill(child, signal.SIGCONT)
    os.waitpid(child, 0)


def test_who_may_still_be_alive(tmp_path, ended, monkeypatch):
    here = Process.this()
    for gone in (
        ended,
        replace(here, start=here.start + 1),  # another process has the id now
        replace(here, boot="before", machine="the same", namespace="a"),
        replace(here, namespace="that of another container"),
    ):
        monkeypatch.setattr(Process, "this", lambda machine=gone.machine: replace(here, machine=machine))
        write(tmp_path, gone)
        assert refusal(tmp_path) is None, gone
    write(tmp_path, replace(here, host="elsewhere", boot="other"))
    message = refusal(tmp_path) or ""
    release = f"rm {tmp_path / LOCK_NAME}"
    assert f"belongs to process {here.pid} on elsewhere" in message and message.endswith(release)
    subprocess.run(release.split(), check=True)
    assert refusal(tmp_path) is None


def test_a_folder_is_free_after_any_end(tmp_path):
    with pytest.raises(KeyboardInterrupt), Ownership() as mine:
        mine.take_folders(
            {KEY: str(tmp_path / "a"), "again": str(tmp_path / "b/../a"), "none": None, "far": "hdfs://x"}
        )
        assert "alive" in (refusal(tmp_path / "a") or "")
        raise KeyboardInterrupt
    assert not [*(tmp_path / "a").iterdir()] and refusal(tmp_path / "a") is None


ENDING = f"""
import os, signal, sys, time
from pathlib import Path
from verl.trainer.run import launch
from verl.utils.process.owner import Ownership, free_folders
if sys.argv[2] == "Ctrl-C":
    launch.catch_signals()
with Ownership() as owner:
    owner.take_folders({{"{KEY}": sys.argv[1]}})
    print("taken", flush=True)
    if sys.argv[2] == "os._exit":
        free_folders()
        os._exit(3)
    while True:
        time.sleep(0.001)
"""


@pytest.mark.parametrize("how", ["SIGTERM", "SIGHUP", "Ctrl-C", "os._exit"])
def test_a_folder_is_free_after_a_signal(tmp_path, how):
    """For another machine, which cannot see that the process has gone: no file may be left."""
    with subprocess.Popen(
        [sys.executable, "-c", ENDING, str(tmp_path), how], stdout=subprocess.PIPE, text=True, stderr=subprocess.PIPE
    ) as process:
        assert answer(process) == "taken"
        number = {"SIGTERM": signal.SIGTERM, "SIGHUP": signal.SIGHUP, "Ctrl-C": signal.SIGINT}.get(how)
        for _ in range(8 if number else 0):  # several quick ones
            if process.poll() is None:
                process.send_signal(number)
        code = process.wait()
    assert code == {"SIGTERM": -15, "SIGHUP": -1, "os._exit": 3}.get(how, code)
    assert not [*tmp_path.iterdir()]


FORKING = f"""
import os, sys, time
from verl.utils.process.owner import Ownership
from verl.utils.process.interrupts import catch_signals
if sys.argv[2] == "command":
    catch_signals()
with Ownership() as owner:
    owner.take_folders({{"{KEY}": sys.argv[1]}})
    is_up, tell_up = os.pipe()
    child = os.fork()
    if not child:
        os.write(tell_up, b"!")
        while True:
            time.sleep(1)
    os.read(is_up, 1)
    print("up", flush=True)
    os.kill(child, int(sys.stdin.readline()))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("number", "parent"),
    [(signal.SIGTERM, "command"), (signal.SIGTERM, "program"), (signal.SIGHUP, "command"), (signal.SIGKILL, "command")],
)
def test_a_forked_child_that_dies_of_a_signal_frees_nothing(tmp_path, number, parent):
    """It runs no handler of its parent, which still owns the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", FORKING, str(tmp_path), parent], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert answer(process) == "up"
            tell(process, int(number))
            assert answer(process) == str(-number)
            assert json.loads((tmp_path / LOCK_NAME).read_text())["pid"] == process.pid
            assert f"alive, process {process.pid}" in (refusal(tmp_path) or "")
            tell(process)
            assert process.wait() == 0
        finally:
            process.kill()
    assert not [*tmp_path.iterdir()]


def test_what_cannot_be_a_lock_is_one_line(tmp_path):
    (tmp_path / "file").touch()
    for name, make in {
        "garbage": lambda path: path.write_bytes(b"\xff{"),
        "deep": lambda path: path.write_text("[" * 20_000),
        "other": lambda path: path.write_text('{"pid": "1"}'),
        "pipe": os.mkfifo,
        "link": lambda path: path.symlink_to(tmp_path / "file"),
        "folder": os.mkdir,
    }.items():
        (tmp_path / name).mkdir()
        make(tmp_path / name / LOCK_NAME)
        message = refusal(tmp_path / name) or ""
        assert message.startswith(f"{KEY}={tmp_path / name}: ") and "\n" not in message, message
    for folder in (tmp_path / "file" / "a" / "b", Path("/proc/none/a")):
        assert "cannot be written: " in (refusal(folder) or "")
