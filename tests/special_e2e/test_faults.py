"""A process of a run dies or is stopped in the middle of a phase."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress

import psutil
import pytest

from tests.waiting import wait_until

from .conftest import Workspace, assert_bit_for_bit, is_of_session, leftovers
from .test_async_rollout import ASYNC, SHORT
from .test_standalone_servers import APART
from .test_train import TWO_WORKERS, assert_names_the_death


@pytest.mark.full  # test_train.py has one in the update
@pytest.mark.parametrize("point", ["generate", "weight_sync"])
def test_a_death_ends_the_run_at_once(workspace, tmp_path, point):
    """The peer of the worker that dies waits in a collective."""
    fault = {"VERL_FAULT": f"kill:{point}:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    overrides = TWO_WORKERS | {"actor_rollout_ref.nccl_timeout": 3600}
    run = workspace.train(f"die-in-{point}", overrides, env=fault, fails=True)
    _, where = (tmp_path / "fault").read_text().split(maxsplit=1)
    assert where.startswith(point)
    assert_names_the_death(run.output, 1, point, 2)


def test_a_hang_ends_the_run_after_the_timeout_of_the_group(workspace, tmp_path):
    """SIGSTOP: nothing has died, so only the peer's deadline in a collective can tell."""
    fault = {"VERL_FAULT": "hang:update_actor:rank=1:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    timeout_s = 15
    overrides = TWO_WORKERS | {"actor_rollout_ref.nccl_timeout": timeout_s}
    run = workspace.train("hang-in-update", overrides, env=fault, fails=True)
    _, where = (tmp_path / "fault").read_text().split(maxsplit=1)
    assert where.startswith("update_actor")
    message = run.output[run.output.rindex("\nError: ") :]
    assert "WorkerTimeoutError: worker rank 1" in message and "update_actor, step 2" in message, message
    assert "rank 0 gave up waiting in a collective" in message, message


# ---- processes that no worker group knows

STOPPED = r"has not answered for \d s: it is stopped \(SIGSTOP\)"
KILLED = "was killed by SIGKILL"
LOST = [
    ("hang", "raylet", f"Ray's raylet {STOPPED}"),
    # Ray's handler aborts if it takes over 3 s.
    pytest.param("crash", None, "the trainer process was killed by SIG(SEGV|ABRT)", marks=pytest.mark.full),
    pytest.param("hang", None, f"the trainer process {STOPPED}", marks=pytest.mark.full),
    pytest.param("kill", None, f"the trainer process {KILLED}", marks=pytest.mark.full),
    pytest.param("kill", "gcs", f"Ray's GCS {KILLED}", marks=pytest.mark.full),
    pytest.param("hang", "gcs", f"Ray's GCS {STOPPED}", marks=pytest.mark.full),
    pytest.param("kill", "raylet", f"Ray's raylet {KILLED}", marks=pytest.mark.full),
]


@pytest.mark.parametrize("action, target, what", LOST)
def test_a_lost_process_is_named_at_once(workspace, tmp_path, action, target, what):
    """With the phase and the scorer of the trainer; ``train`` asserts that nothing is left behind."""
    name = f"{action}-{target or 'trainer'}"
    on = f":on={target}" if target else ""
    fault = {"VERL_FAULT": f"{action}:trainer_reward:step=2{on}", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    limits = {"trainer.worker_call_timeout_s": 4}
    run = workspace.train(name, limits, env=fault, fails=True, module="tests.special_e2e.lost_runs")
    message = re.sub(r" \(pid \d+\)", "", run.output[run.output.rindex("\nError: ") :])
    where = "; the trainer was in phase reward, step 2, in the scorer compute_score of mine.py\n"
    assert re.search(f"LostProcessError: {what}{where}", message), message
    assert "LostProcessError" in (run.folder / "error.log").read_text()


def test_an_exception_of_the_trainer_is_the_message(workspace, tmp_path):
    fault = {"VERL_FAULT": "raise:trainer_reward:step=2", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    run = workspace.train("raise", env=fault, fails=True, module="tests.special_e2e.lost_runs")
    message = run.output[run.output.rindex("\nError: ") :].strip().splitlines()
    assert message[0].startswith("Error: InjectedFault: injected at trainer_reward, rank 0, step 2")
    assert message[-1].startswith("The whole trace is in") and len(message) == 2, message


@pytest.mark.full
def test_the_memory_monitor_of_ray_is_named(workspace):
    """Every use of memory is above its threshold here."""
    monitor = {"RAY_memory_usage_threshold": "0.01", "RAY_memory_monitor_refresh_ms": "200"}
    run = workspace.train("memory", env=monitor, fails=True, module="tests.special_e2e.lost_runs")
    assert "killed due to the node running low on memory" in run.output[run.output.rindex("\nError: ") :], run.output


def test_ctrl_c_ends_a_run_whose_ray_is_stopped(workspace, tmp_path):
    """The shutdown of Ray hangs there, and so did the launching process, which ignored signals meanwhile."""
    proof = tmp_path / "fault"
    fault = {"VERL_FAULT": "hang:trainer_reward:on=gcs", "VERL_FAULT_FILE": str(proof)}
    with workspace.start("stopped-gcs", env=fault, module="tests.special_e2e.lost_runs") as process:
        wait_until(proof.exists, pause_s=0.1)
        process.send_signal(signal.SIGINT)
        output = process.communicate()[0]
    assert process.returncode == 130, output
    assert output.strip().splitlines()[-1].startswith("interrupted: there is no checkpoint"), output
    assert not leftovers(process.pid)


CHILD = """
import os, signal
from verl.utils.process.lifetime import die_with_parent
if os.fork() == 0:
    die_with_parent()
    os.write(1, f"{os.getpid()}\\n".encode())
    os.kill(os.getpid(), signal.SIGSTOP)
signal.pause()
"""


def test_a_stopped_process_does_not_outlive_its_parent():
    with subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True) as parent:
        child = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    child.wait()


@pytest.mark.full
def test_the_next_complete_save_removes_the_checkpoint_of_a_killed_one(workspace, tmp_path):
    """The run dies while it saves step 3; the resumed one saves other steps, and has the numbers of a whole run."""
    often = {"trainer.save_freq": 1, "trainer.record_digests": True}
    whole = workspace.train("whole-saves", often)
    fault = {"VERL_FAULT": "kill:save_checkpoint:rank=0:step=3", "VERL_FAULT_FILE": str(tmp_path / "fault")}
    killed = workspace.train("killed-save", often, env=fault, fails=True)
    (killed.folder / "global_step_9" / "actor").mkdir(parents=True)  # of somebody else
    assert (killed.folder / "global_step_3" / "actor").exists()
    resumed = workspace.train("killed-save", often | {"trainer.save_freq": 4})
    assert resumed.output.count(f"that a killed run had left: {killed.folder}/global_step_3") == 1
    assert sorted(path.name for path in killed.folder.glob("global_step_*")) == [
        f"global_step_{step}" for step in (1, 2, 4, 9)
    ]
    assert_bit_for_bit(resumed, whole, (1, 2, 3, 4))


@pytest.mark.full
@pytest.mark.parametrize("package", ["vllm", "sglang", "megatron.core"])
def test_the_next_run_removes_the_temporary_files_of_a_killed_one(workspace, package):
    """All processes of the run are killed, also those that would remove them."""
    pytest.importorskip(package)
    engine = package.partition(".")[0]
    overrides = SHORT | ASYNC | APART | {"actor_rollout_ref.rollout.name": engine}
    if engine == "megatron":
        overrides = SHORT | {"--config-name": "ppo_megatron_trainer"}
    with tempfile.TemporaryDirectory(prefix="v") as place:  # the paths of sockets may have about 100 characters
        with workspace.start(f"littering-{engine}", overrides, {"TMPDIR": place}) as process:
            record = workspace.folder / f"littering-{engine}" / "metrics.jsonl"
            wait_until(lambda: process.poll() is not None or (record.exists() and record.stat().st_size))
            for each in [each for each in psutil.process_iter() if is_of_session(each, process.pid)]:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
        assert any(name.startswith("verl-") for name in os.listdir(place))
        workspace.train(f"after-{engine}", overrides, {"TMPDIR": place})
        known = ("ray", "verl-permits-")  # the logs of Ray, and locks that all runs of a user share
        assert not [name for name in os.listdir(place) if not name.startswith(known)]


KINDS = {
    "batches": {},
    "agent-loops": ASYNC,
    "servers": ASYNC | APART,
    "megatron": {"--config-name": "ppo_megatron_trainer"},
}
FULL = """
mount -t tmpfs -o size=400m none "$1" && shift && exec "$@"
"""


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_a_temporary_disk_that_is_full_does_not_end_a_run(tmp_path, kind):
    """It is full after step 1; the run ends at step 3 with all its files, and says once where its notes do not go."""
    workspace = Workspace(tmp_path)  # without workers that are forked outside of the mount
    private = ["unshare", "--map-root-user", "--mount"]
    with tempfile.TemporaryDirectory(prefix="v") as place:
        mounted = [*private, "sh", "-c", FULL, "sh", place]
        if subprocess.run([*mounted, "true"], capture_output=True, check=False).returncode:
            pytest.skip("this machine mounts no disk for the test")
        overrides = SHORT | KINDS[kind] | {"trainer.total_training_steps": 3, "trainer.save_freq": 1}
        folder = workspace.folder / "full"
        with workspace.start("full", overrides, {"TMPDIR": place}, wrapper=mounted) as process:
            record = folder / "metrics.jsonl"
            wait_until(lambda: process.poll() is not None or (record.exists() and record.stat().st_size))
            with suppress(OSError), open(f"/proc/{process.pid}/root{place}/filler", "wb", buffering=0) as filler:
                while True:
                    filler.write(bytes(4096))
            output = process.communicate()[0]
    assert process.returncode == 0, output
    assert "step 3/3" in output and (folder / "global_step_3").is_dir()
    notes = [line for line in output.splitlines() if "cannot be written" in line]  # Ray has lines of its own
    (note,) = notes
    assert re.search(f"{place}/\\S+ cannot be written .No space left on device.: .*the run continues", note), output
    assert not leftovers(process.pid)
