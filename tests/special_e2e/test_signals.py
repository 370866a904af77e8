"""Signals to the launching process end the whole run; its last line tells how to go on, and that command does."""

import os
import shlex
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.waiting import wait_until
from verl.utils.report.compare import compare_runs

from .conftest import PYTHON, REPOSITORY, Run, Workspace, assert_bit_for_bit, is_of_session, leftovers
from .held import GO, WAITS

FULL = pytest.mark.full
HELD = Path(__file__).with_name("held.py")
HELD_RUN = {"custom_reward_function.path": HELD, "trainer.save_freq": -1, "trainer.save_on_sigterm_s": 600}


def start(workspace: Workspace, command: list[str], name: str, is_preloaded: bool = True) -> subprocess.Popen[str]:
    """Start a command in a session of processes, whose output goes to a file."""
    own = {"PYTHONPATH": str(REPOSITORY), "VERL_FILE_LOGGER_ROOT": str(workspace.folder)}
    own |= {"HELD_RUN": str(workspace.folder / name)} | (workspace.preloaded_workers if is_preloaded else {})
    with output_of(workspace, name).open("w", encoding="utf-8") as output:
        return subprocess.Popen(
            command,
            env=os.environ | own,
            cwd=workspace.folder,
            stdout=output,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def output_of(workspace: Workspace, name: str) -> Path:
    return workspace.folder / f"{name}.output"


def wait_for(process: subprocess.Popen[str], happened: Callable[[], object]) -> None:
    """Wait for an event of a run that lives."""
    wait_until(lambda: happened() or process.poll() is not None)
    assert process.returncode is None, f"ended with {process.returncode}"


def last_line(workspace: Workspace, name: str) -> str:
    return output_of(workspace, name).read_text(encoding="utf-8").strip().splitlines()[-1].removesuffix("\x1b[0m")


def end_held(workspace: Workspace, command: list[str], name: str, asks_twice: bool = False) -> str:
    """Send SIGTERM to a run that waits in its third step, and let it go on; return its last line.

    With ``asks_twice`` another SIGTERM comes while it waits. A run goes on when its trainer has been asked to end, but
    supervised training, which looks at the end of each step.
    """
    has_trainer = not any("sft_trainer" in word for word in command)
    with start(workspace, command, name) as process:
        wait_for(process, (workspace.folder / name / WAITS).exists)
        process.send_signal(signal.SIGTERM)
        if has_trainer:
            asked = "SIGTERM: the run saves"
            wait_for(process, lambda: asked in output_of(workspace, name).read_text(encoding="utf-8"))
        if asks_twice:
            process.send_signal(signal.SIGTERM)
        else:
            (workspace.folder / name / GO).touch()
        code = process.wait()
    assert code == 143, output_of(workspace, name).read_text(encoding="utf-8")
    assert not leftovers(process.pid)
    assert not (workspace.folder / name / ".owner").exists()
    return last_line(workspace, name)


def go_on(workspace: Workspace, line: str, name: str) -> Run:
    """Run the command that a last line names to its end."""
    began = time.time()
    (workspace.folder / name / GO).touch()
    with start(workspace, shlex.split(line.partition(" with: ")[2]), name) as process:
        code = process.wait()
    output = output_of(workspace, name).read_text(encoding="utf-8")
    assert code == 0, output
    return Run(code, output, time.time() - began, workspace.folder / name)


def assert_saves_and_goes_on(
    workspace: Workspace, overrides: dict[str, object], whole: Run, saved: int = 2, **command: str
) -> None:
    """Assert that a run that SIGTERM ends in its third step goes on from a saved one as if nothing had happened."""
    name = f"{command.pop('name', whole.folder.name)}-sigterm"
    line = end_held(workspace, workspace.command(name, overrides | HELD_RUN, **command), name)
    folder = workspace.folder / name / f"global_step_{saved}"
    assert line.startswith(f"terminated: the last checkpoint is {folder}, no full step is lost; go on with: "), line
    resumed = go_on(workspace, line, name)
    assert sorted(resumed.steps) == sorted(whole.steps)
    assert_bit_for_bit(resumed, whole, whole.steps)


@pytest.mark.slow
@FULL
def test_another_sigterm_leaves_the_save_out(workspace):
    name = "sigterm-twice"
    line = end_held(workspace, workspace.command(name, HELD_RUN | {"trainer.test_freq": -1}), name, asks_twice=True)
    assert line.startswith("terminated: there is no checkpoint, steps 1 to 2 are lost; start again with: "), line
    assert not (workspace.folder / name / "latest_checkpointed_iteration.txt").exists()


@pytest.mark.slow
@FULL
@pytest.mark.parametrize("processes", [1, 2])
def test_supervised_training_saves_after_sigterm(workspace, processes):
    """Alone, and under torchrun, whose own lines follow that of the run."""
    launch = [*PYTHON, "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "-m"]
    keys = {
        "model.path": workspace.model,
        "model.use_remove_padding": True,
        "data.train_files": workspace.folder / "conversations.parquet",
        "data.custom_cls.path": HELD,
        "data.custom_cls.name": "HeldRows",
        "data.train_batch_size": 4,
        "data.max_length": 64,
        "trainer.device": "cpu",
        "trainer.logger": "[file]",
        "trainer.report": False,
        "trainer.total_epochs": 1,
        "trainer.save_on_sigterm_s": 600,
    }
    names = [f"sft-{processes}-{kind}" for kind in ("whole", "sigterm")]
    commands = []
    for name in names:
        words = [f"{key}={value}" for key, value in keys.items()]
        words.append(f"trainer.default_local_dir={workspace.folder / name}")
        commands.append([*(PYTHON if processes == 1 else launch), "verl.trainer.sft_trainer", *words])
        (workspace.folder / name).mkdir()
    (workspace.folder / names[0] / GO).touch()
    with start(workspace, commands[0], names[0]) as process:
        assert process.wait() == 0, output_of(workspace, names[0]).read_text(encoding="utf-8")
    if processes == 1:
        line = end_held(workspace, commands[1], names[1])
        assert f"the last checkpoint is {workspace.folder / names[1]}/global_step_3, no full step is lost" in line
    else:
        with start(workspace, commands[1], names[1]) as process:
            wait_for(process, (workspace.folder / names[1] / WAITS).exists)
            process.send_signal(signal.SIGTERM)
            (workspace.folder / names[1] / GO).touch()
            process.wait()
        text = output_of(workspace, names[1]).read_text(encoding="utf-8")
        line = next(line for line in text.splitlines() if line.startswith("terminated: "))
    go_on(workspace, line, names[1])
    records = compare_runs(*(workspace.folder / name for name in names))
    assert records.steps == (1, 2, 3, 4) and records.by_digests and records.difference is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "number, code, last",
    [
        (signal.SIGTERM, 143, "terminated: there is no checkpoint, no full step is lost; start again with: "),
        pytest.param(signal.SIGINT, 130, "interrupted: there is no checkpoint, no full", marks=FULL),
        pytest.param(signal.SIGKILL, -9, None, marks=FULL),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_ends_the_run(workspace, number, code, last):
    """Sent to the whole group of processes, as terminals and schedulers do: Ray's daemons say nothing about it."""
    name = f"signal-{number}"
    overrides = {"trainer.total_training_steps": 10_000, "ray_kwargs.fork_workers": None}
    with start(workspace, workspace.command(name, overrides), name, is_preloaded=False) as process:
        wait_for_worker(process)
        os.killpg(process.pid, number)
        assert process.wait() == code
    output = output_of(workspace, name).read_text(encoding="utf-8")
    assert last is None or last_line(workspace, name).startswith(last), output
    assert "raylet" not in output and "Traceback" not in output
    assert not leftovers(process.pid)
    assert last is None or not (workspace.folder / name / ".owner").exists()


def wait_for_worker(process: subprocess.Popen[str]) -> None:
    """Wait until a worker of the run is at work: its process has imported torch."""

    def is_at_work(each: psutil.Process) -> bool:
        large = each.info["memory_info"] is not None and each.info["memory_info"].rss > 400 << 20
        return large and str(each.info["name"]).startswith("ray::Worker") and os.getsid(each.pid) == process.pid

    wait_for(process, lambda: any(map(is_at_work, psutil.process_iter(["name", "memory_info"]))))


@pytest.mark.slow
@FULL
@pytest.mark.parametrize("moment", ["gcs_server", "raylet", "ray::TaskRunner", "ray::Worker"])
def test_several_ctrl_c_while_a_run_starts(workspace, moment):
    """With 130, one line, and no process of Ray that outlives the launch."""
    name = f"several-{moment.removeprefix('ray::')}"
    with start(workspace, workspace.command(name, {"ray_kwargs.fork_workers": None}), name, False) as process:
        wait_for(process, lambda: any(each.name().startswith(moment) for each in processes_of(process.pid)))
        for _ in range(5):
            process.send_signal(signal.SIGINT)
            time.sleep(0.05)
        assert process.wait() == 130
    output = output_of(workspace, name).read_text(encoding="utf-8")
    assert last_line(workspace, name).startswith("interrupted: there is no checkpoint, no full step is lost"), output
    assert "Traceback" not in output and not leftovers(process.pid)


def processes_of(session: int) -> list[psutil.Process]:
    return [each for each in psutil.process_iter(["name"]) if is_of_session(each, session)]
